"""`parse_quantization`: from the description of quantised weights in a configuration to a `QuantSpec`.

It comes as `quantization_config` or `compression_config` of a config.json, or as `quantization` of ModelOpt's
hf_quant_config.json. A format that Quire does not read becomes a spec that says so, because `quire doctor` and dummy
weights need no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.files.reading import shown
from quire.models.config.keys import ConfigKeys
from quire.quant.spec import ActivationScheme, QuantGroup, QuantSpec
from quire.types import ModelError

_BLOCK = [128, 128]
_PACKED_FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
_MODELOPT = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "dynamic", "FP8_PB_WO": "none", "NVFP4": "none",
             "NVFP4_AWQ": "none", "W4A16_NVFP4": "none"}  # fmt: skip


def parse_quantization(settings: dict[str, Any], where: str = "quantization_config") -> QuantSpec | None:
    """Parse the description of quantised weights; None if it is empty.

    Raises:
        ModelError: if a field has a bad value; names it.
    """
    if not settings:
        return None
    keys = ConfigKeys(settings, where)
    named = settings.get("quant_method", settings.get("quant_algo", "unknown"))
    method = named if isinstance(named, str) and len(named) < 40 else shown(named)
    if "quant_algo" in settings and method not in _PARSERS:
        method = "modelopt"
    parse = _PARSERS.get(method)
    if parse is None:
        known = ", ".join(sorted(_PARSERS))
        return QuantSpec(method=method, unsupported=f"supported are: {known}")
    return parse(keys)


def _fp8(keys: ConfigKeys) -> QuantSpec:
    block = keys.entries("weight_block_size", int)
    number = keys.text("fmt", default="e4m3")
    activations = _scheme(keys, default="dynamic")
    fault = None
    if block is not None and block != _BLOCK:
        fault = f"weight_block_size {shown(block)}; supported are blocks of {_BLOCK}"
    elif number not in ("e4m3", "float8_e4m3fn"):
        fault = f"fmt {shown(number)}; supported is e4m3"
    detail = "blocks of 128x128" if block else f"{activations} activations"
    return QuantSpec(
        method="fp8", detail=detail, groups=(QuantGroup(activations=activations),), unsupported=fault
    )


def _scheme(keys: ConfigKeys, default: str) -> ActivationScheme:
    scheme = keys.text("activation_scheme", default=default)
    if scheme == "static":
        return "static"
    if scheme == "dynamic":
        return "dynamic"
    raise keys.refuse("activation_scheme", "static or dynamic", scheme)


def _compressed_tensors(keys: ConfigKeys) -> QuantSpec:
    form = keys.text("format", default="dense")
    fault = None if form in _PACKED_FORMATS else f"format {shown(form)}"
    sparsity = keys.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        fault = f"sparsity {shown(sparsity['format'])}"
    if keys.section("transform_config"):
        fault = "transform_config, rotations of weights and activations"
    groups = keys.section("config_groups")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise keys.refuse("config_groups", "an object of objects", groups)
    parsed = tuple(_group(ConfigKeys(group, f"{keys.where}: {name}")) for name, group in groups.items())
    return QuantSpec(method="compressed-tensors", detail=form, groups=parsed, unsupported=fault)


def _group(keys: ConfigKeys) -> QuantGroup:
    weights, inputs = keys.section("weights"), keys.section("input_activations")
    if keys.section("output_activations"):
        raise ModelError(f"{keys.where}: output_activations are not supported")
    activations: ActivationScheme = "none"
    input_keys = ConfigKeys(inputs, keys.where)
    if inputs and input_keys.integer("num_bits", default=8) == 8:  # 4-bit activations are computed in 16 bits
        activations = "dynamic" if inputs.get("dynamic") in (True, "local") else "static"
        if not input_keys.flag("symmetric", default=True):
            raise ModelError(f"{keys.where}: asymmetric activations are not supported")
    size = weights.get("group_size")
    return QuantGroup(
        targets=tuple(keys.entries("targets", str) or ("Linear",)),
        activations=activations,
        bits=ConfigKeys(weights, keys.where).integer("num_bits", default=8),
        group_size=size if isinstance(size, int) and size > 0 else None,
    )


def _gptq(keys: ConfigKeys) -> QuantSpec:
    bits, size = keys.integer("bits"), keys.get("group_size", default=-1)
    version = keys.text("checkpoint_format", default="gptq")
    group = QuantGroup(bits=bits, group_size=size if isinstance(size, int) and size > 0 else None)
    fault = None
    if version not in ("gptq", "gptq_v2"):
        fault = f"checkpoint_format {shown(version)}; supported are gptq, gptq_v2"
    elif bits not in (4, 8):
        fault = f"{bits} bits; supported are 4, 8"
    return QuantSpec(
        method="gptq",
        detail=f"{bits} bits, {_of_group(size)}",
        groups=(group,),
        zero_shift=1 if version == "gptq" else 0,
        unsupported=fault,
    )


def _awq(keys: ConfigKeys) -> QuantSpec:
    bits, size = keys.integer("bits", "w_bit", default=4), keys.get("group_size", "q_group_size", default=128)
    version = keys.text("version", default="gemm").lower()
    fault = None
    if version != "gemm":
        fault = f"version {shown(version)}; supported is gemm"
    elif bits != 4:
        fault = f"{bits} bits; supported are 4"
    group = QuantGroup(bits=bits, group_size=size if isinstance(size, int) and size > 0 else None)
    return QuantSpec(
        method="awq", detail=f"{bits} bits, {_of_group(size)}", groups=(group,), unsupported=fault
    )


def _of_group(size: object) -> str:
    return f"groups of {size}" if isinstance(size, int) and size > 0 else "scales per row"


def _mxfp4(keys: ConfigKeys) -> QuantSpec:
    return QuantSpec(method="mxfp4", groups=(QuantGroup(bits=4, group_size=32),))


def _modelopt(keys: ConfigKeys) -> QuantSpec:
    algo = keys.text("quant_algo", default="FP8")
    if algo not in _MODELOPT:
        known = ", ".join(_MODELOPT)
        return QuantSpec(method="modelopt", unsupported=f"quant_algo {shown(algo)}; supported are: {known}")
    activations: ActivationScheme = {"static": "static", "dynamic": "dynamic"}.get(_MODELOPT[algo], "none")  # type: ignore[assignment]
    is_fp4 = "NVFP4" in algo
    group = QuantGroup(activations=activations, bits=4 if is_fp4 else 8, group_size=16 if is_fp4 else None)
    return QuantSpec(method="modelopt", detail=algo, groups=(group,))


_PARSERS: dict[str, Callable[[ConfigKeys], QuantSpec]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
