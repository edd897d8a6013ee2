"""Layers: the building blocks of models. Each loads its own weights."""
