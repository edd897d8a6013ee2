"""The host side of an engine: scheduler, block pool, prefix cache and step loop. Imports no torch."""
