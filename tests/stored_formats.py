"""Layers in the layouts of published quantised checkpoints: random codes, and the numbers that they mean."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Layer = tuple[Tensors, torch.Tensor]
Size = tuple[int, int]  # outputs and inputs
SIZE: Size = 64, 128


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [rows, n] along the last dimension into int32, lowest bits first."""
    grouped = codes.long().unflatten(-1, (-1, 32 // bits))
    packed = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def codes_of(bits: int, size: Size, seed: int = 0) -> torch.Tensor:
    outputs, inputs = size
    return torch.randint(0, 1 << bits, (outputs, inputs), generator=torch.Generator().manual_seed(seed))


def gptq(
    bits: int, group: int, act_order: bool = False, symmetric: bool = False, seed: int = 0, size: Size = SIZE
) -> Layer:
    """Return the tensors of a GPTQ layer, version 1, and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = size
    codes, groups = codes_of(bits, size, seed), inputs // group
    scale = torch.rand(groups, outputs, generator=generator).half() + 0.5
    zero = torch.randint(1, 1 << bits, (groups, outputs), generator=generator)
    if symmetric:
        zero.fill_(1 << (bits - 1))
    group_of = torch.arange(inputs) // group
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    values = ((codes.t() - zero[group_of]) * scale.float()[group_of]).t()
    tensors = {
        "qweight": pack_int32(codes, bits).t().contiguous(),
        "qzeros": pack_int32(zero - 1, bits),
        "scales": scale,
        "g_idx": group_of.to(torch.int32),
    }
    return tensors, values


def awq(group: int, seed: int = 0, size: Size = SIZE) -> Layer:
    """Return the tensors of an AWQ layer, and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = size
    codes, groups = codes_of(4, size, seed), inputs // group
    scale = torch.rand(groups, outputs, generator=generator).half() + 0.5
    zero = torch.randint(0, 16, (groups, outputs), generator=generator)
    group_of = torch.arange(inputs) // group
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(values: torch.Tensor) -> torch.Tensor:
        return pack_int32(values.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    values = ((codes.t() - zero[group_of]) * scale.float()[group_of]).t()
    return {"qweight": packed(codes.t()), "qzeros": packed(zero), "scales": scale}, values


def pack_quantized(
    bits: int, group: int, symmetric: bool, act_order: bool = False, seed: int = 0, size: Size = SIZE
) -> Layer:
    """Return the tensors of a layer that compressed-tensors packs, and its numbers."""
    generator = torch.Generator().manual_seed(seed + 1)
    outputs, inputs = size
    codes, groups = codes_of(bits, size, seed), inputs // group
    scale = torch.rand(outputs, groups, generator=generator).bfloat16() + 0.5
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=generator)
    group_of = torch.arange(inputs) // group
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    tensors = {
        "weight_packed": pack_int32(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if act_order:
        tensors["weight_g_idx"] = group_of.to(torch.int32)
    if symmetric:
        zero.fill_(1 << (bits - 1))
    else:
        tensors["weight_zero_point"] = pack_int32(zero.t(), bits).t().contiguous()
    return tensors, (codes - zero[:, group_of]) * scale.float()[:, group_of]


def fp8(scale: torch.Tensor, suffix: str = "weight_scale", seed: int = 0, size: Size = SIZE) -> Layer:
    """Return the tensors of an FP8 layer, and its numbers."""
    outputs, inputs = size
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(
        torch.float8_e4m3fn
    )
    spread = scale.float()
    if scale.dim() == 2 and scale.shape[1] > 1:
        spread = spread.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return {"weight": weight, suffix: scale}, weight.float() * spread


def fp4(nvidia: bool, modelopt: bool = False, seed: int = 0, size: Size = SIZE) -> Layer:
    """Return the tensors of an NVFP4 or MXFP4 layer, and its numbers."""
    outputs, inputs = size
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes, group = codes_of(4, size, seed), 16 if nvidia else 32
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    tensors = {"weight" if modelopt else "weight_packed": packed}
    if nvidia:
        scale = (torch.rand(outputs, inputs // group) * 100 + 1).to(torch.float8_e4m3fn)
        tensors["weight_scale"] = scale
        tensors |= (
            {"weight_scale_2": torch.tensor(0.25)}
            if modelopt
            else {"weight_global_scale": torch.tensor([4.0])}
        )
        factor = scale.float() / 4
    else:
        exponents = torch.randint(110, 140, (outputs, inputs // group), dtype=torch.uint8)
        tensors["weight_scale"], factor = exponents, torch.exp2(exponents.float() - 127)
    return tensors, table[codes] * factor.repeat_interleave(group, 1)


def compressed(form: str, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
