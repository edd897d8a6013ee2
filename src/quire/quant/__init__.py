"""Number formats of linear layers."""
