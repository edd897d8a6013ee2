"""`QuantSpec`: what a checkpoint's configuration says about its quantised weights. Plain data, without torch.

The tensors of the checkpoint decide how each weight is stored; the spec adds what tensors cannot say. Its parser is
models/config/quantization.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# The formats of `--quantization`.
Conversion = Literal["fp8", "fp8-block", "int8", "int4"]
ActivationScheme = Literal["none", "static", "dynamic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantGroup:
    """The layers that share a scheme.

    Args:
        targets: class names, module names, or patterns that begin with `re:`.
        activations: how the format rounds activations.
        bits: of a weight.
        group_size: columns with a common scale; None if the tensors tell it.
    """

    targets: tuple[str, ...] = ("Linear",)
    activations: ActivationScheme = "none"
    bits: int = 8
    group_size: int | None = None

    def holds(self, module: str) -> bool:
        """Return whether the layer `module`, a linear layer, belongs to this group."""
        return any(target == "Linear" or _matches(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """A quantised checkpoint, or a conversion while loading.

    Args:
        method: name of the format: compressed-tensors, fp8, gptq, awq, mxfp4, modelopt, gguf, or a `Conversion`.
        detail: what else identifies the format, for messages.
        groups: schemes of layers; the first that holds a layer counts.
        zero_shift: added to stored zero points (the first version of GPTQ's files stores them minus 1).
        convert: format that plain weights are converted to while loading; None: they stay plain.
        group_size: columns with a common scale, of the conversion.
        unsupported: why Quire cannot read the format; None: it can.
    """

    method: str
    detail: str = ""
    groups: tuple[QuantGroup, ...] = ()
    zero_shift: int = 0
    convert: Conversion | None = None
    group_size: int = 128
    unsupported: str | None = None

    def __str__(self) -> str:
        return f"{self.method} ({self.detail})" if self.detail else self.method

    def activations(self, module: str) -> ActivationScheme:
        """Return how activations of the layer `module` are rounded."""
        return next((group.activations for group in self.groups if group.holds(module)), "none")


def _matches(target: str, module: str) -> bool:
    """Return whether a target of compressed-tensors names `module`: exactly, by its last part, or by a pattern."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith("." + target)
