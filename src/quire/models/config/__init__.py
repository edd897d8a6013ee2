"""Parsers from a checkpoint's configuration to a `ModelSpec`; they check every field."""
