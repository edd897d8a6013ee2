"""Benchmarks: what an engine reaches on this machine, and what holds it back."""
