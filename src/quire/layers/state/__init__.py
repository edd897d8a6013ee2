"""Layers with a state per request: short convolutions, linear attention, state spaces.

The functions of conv.py, recurrence.py and selective_scan.py work on ragged batches in plain PyTorch. They
define what the kernels of kernels/state/ compute. The other modules are the layers that call them.
"""
