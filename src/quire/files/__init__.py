"""Files of a checkpoint, which may hold anything: only regular files are opened, and sizes are checked first."""
