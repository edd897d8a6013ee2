"""Model families, their configs and checkpoints."""
