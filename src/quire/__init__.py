"""Quire: an LLM inference engine that can be read in an afternoon."""

__version__ = "0.1.0"
