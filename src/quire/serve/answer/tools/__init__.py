"""Calls of tools: what a request asks for, how models write calls, and grammars that make them."""
