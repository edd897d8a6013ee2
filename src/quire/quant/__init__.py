"""Number formats of linear layers, and their matrix products."""
