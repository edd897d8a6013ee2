"""Attention back ends over a paged KV cache."""
