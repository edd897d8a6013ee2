"""The client of `quire bench serve`."""
