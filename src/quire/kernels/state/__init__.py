"""Kernels of layers with a state per request: short convolutions, linear attention, state spaces."""
