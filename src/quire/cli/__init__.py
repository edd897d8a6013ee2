"""The quire command."""
