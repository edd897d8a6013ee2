"""Triton kernels of a mixture-of-experts layer: routing, grouping of tokens by expert, and the experts' products."""
