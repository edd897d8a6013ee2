"""Checkpoint formats and the threads that read them onto a GPU."""
