"""Model families, their configurations and checkpoints."""
