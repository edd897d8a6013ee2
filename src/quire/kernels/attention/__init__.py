"""Triton kernels of attention over blocks of the KV cache."""
