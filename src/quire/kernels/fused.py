"""The `Kernels` of a GPU."""

from quire.kernels import lookup
from quire.kernels.activation import gated
from quire.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from quire.kernels.rope import norm_rotate_

__all__ = ["add_layer_norm", "add_rms_norm", "gated", "layer_norm", "lookup", "norm_rotate_", "rms_norm"]
