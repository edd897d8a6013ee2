"""Checkpoint formats, and the threads that read them into GPU memory."""
