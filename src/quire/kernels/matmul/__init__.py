"""Triton kernels of products with few rows."""
