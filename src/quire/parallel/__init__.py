"""Tensor parallelism: how a model is sharded over ranks."""
