"""Triton attention kernels over the blocks of the KV cache."""
