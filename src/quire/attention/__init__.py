"""Attention back ends for a paged KV cache."""
