"""The stages of a step, its shapes, and the batches at both ends."""
