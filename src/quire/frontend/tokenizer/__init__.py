"""Text to token ids and back, for every vocabulary format."""
