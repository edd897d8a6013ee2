"""Structured output: grammars compiled from specs, and the token masks that enforce them."""
