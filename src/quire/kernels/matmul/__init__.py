"""Triton matrix products with few rows, and with grouped rows."""
