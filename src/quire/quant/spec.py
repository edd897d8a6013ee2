"""`QuantSpec`: what a checkpoint's configuration says about its quantised weights. Plain data, without torch.

The tensors of the checkpoint decide how each weight is stored; the spec adds what tensors cannot say. Its parser is
models/config/quantization.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from quire.types import ConfigError

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

    @property
    def is_fp8(self) -> bool:
        """Return whether matrices are stored in FP8."""
        return (self.like_conversion() or "").startswith("fp8")

    def like_conversion(self) -> Conversion | None:
        """Return the conversion whose numbers have as many bits; None if the format is not supported."""
        if self.unsupported or self.convert:
            return self.convert
        if self.method == "fp8" or self.detail in ("float-quantized", "FP8"):
            return "fp8-block" if "blocks" in self.detail else "fp8"
        return "int4" if any(group.bits == 4 for group in self.groups) else "int8"

    def activations(self, module: str) -> ActivationScheme:
        """Return how activations of the layer `module` are rounded."""
        return next((group.activations for group in self.groups if group.holds(module)), "none")


def served_format(
    stored: QuantSpec | None, wanted: str, dummy: bool, group_size: int = 128
) -> QuantSpec | None:
    """Return the spec of the weights as they are served.

    Args:
        stored: of the checkpoint.
        wanted: `auto`, or a `Conversion`.
        dummy: the weights are random numbers, which are converted to what the checkpoint would hold.
        group_size: of a conversion to int4.

    Raises:
        ConfigError: if a conversion is wanted, but the checkpoint is quantised already.
    """
    if wanted == "auto" and not dummy:
        return stored
    if stored and not dummy:
        raise ConfigError(
            f"quantization {wanted} converts plain weights, but this checkpoint is quantised already "
            f"({stored}); use quantization auto"
        )
    convert = stored and stored.like_conversion() if wanted == "auto" else wanted
    if not convert:
        return None
    size = next((g.group_size for g in stored.groups if g.group_size), group_size) if stored else group_size
    return QuantSpec(method=convert, convert=cast(Conversion, convert), group_size=size)


def _matches(target: str, module: str) -> bool:
    """Return whether a target of compressed-tensors names `module`: exactly, by its last part, or by a pattern."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith("." + target)
