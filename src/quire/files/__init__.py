"""Safe reading of checkpoint files: only regular files are opened, and sizes are checked first."""
