"""Structured output: compiling what an answer must be, and the masks that hold it to that."""
