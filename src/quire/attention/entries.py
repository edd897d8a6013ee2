"""Keys and values as the KV cache stores them: plain numbers, or codes with scales (`KVCodes`).

A code is rounded to the nearest multiple of its scale. Scales are fp32: one for each head of a token, which is the
head's largest magnitude divided by the largest code, or one for each head of a layer, from the checkpoint. An entry
that is not finite gets the scale NaN or, with static scales, codes that are NaN, so exactly its readers become NaN.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from quire.attention.base import KV, AttentionLayer

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Scales below this have no inverse in fp32. Their codes are 0.
LEAST_SCALE = 1e-30

Slots = torch.Tensor | slice  # int64 [n] KV slots, or a range of them


def block_shape(head_axis: int, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of the blocks of one tensor, whose heads are at `head_axis` (1 or 2)."""
    if head_axis == 1:
        return (num_blocks, heads, block_size, dim)
    return (num_blocks, block_size, heads, dim)


class Coded(NamedTuple):
    """The blocks of a layer whose entries are codes."""

    keys: torch.Tensor  # codes, in the back end's block layout
    values: torch.Tensor
    key_scales: torch.Tensor  # the same shape with 1 number per head; expanded, with strides of 0, if static
    value_scales: torch.Tensor
    static: bool


def holds_codes(kv: KV) -> bool:
    """Return whether the tensors of a layer hold codes instead of plain numbers."""
    return kv[0].dtype in LARGEST


def coded(kv: KV, layer: AttentionLayer, head_axis: int = 2) -> Coded | None:
    """Return the codes and scales of a layer, or None if its entries are plain numbers.

    Args:
        kv: the layer's tensors.
        layer: supplies static scales.
        head_axis: of the block layout.
    """
    if not holds_codes(kv):
        return None
    if len(kv) == 4:
        return Coded(*kv, static=False)
    assert layer.kv_scales is not None, "codes without scales in the cache need static ones"
    shape = [1, 1, 1, 1]
    shape[head_axis] = -1
    sizes = (*kv[0].shape[:3], 1)
    key_scales, value_scales = (scale.view(shape).expand(sizes) for scale in layer.kv_scales)
    return Coded(kv[0], kv[1], key_scales, value_scales, static=True)


def round_heads(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of x [..., dim] and their scales [..., 1].

    Args:
        x: heads.
        dtype: of codes, a key of LARGEST.
        scale: static scales that broadcast to [..., 1]; None: each head gets its own.
    """
    x, largest = x.float(), LARGEST[dtype]
    static = scale is not None
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) * (1 / largest)
        scale = torch.where(scale.isfinite(), scale, float("nan"))
    factor = torch.where(scale > LEAST_SCALE, 1 / scale, 0.0)
    codes = (x * factor).clamp_(-largest, largest)
    if static:
        codes.masked_fill_(~x.isfinite(), float("nan"))
    else:
        codes.nan_to_num_(0.0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


class Entries(Protocol):
    """Keys and values of a layer by KV slot, for back ends in plain PyTorch."""

    def write(self, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v [n, kv heads, dim], and return them as `read` will."""
        ...

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [n, kv heads, dim]."""
        ...


def entries_of(layer: AttentionLayer, kv: KV, dtype: torch.dtype, head_axis: int = 2) -> Entries:
    """Return the entries of a layer.

    Args:
        layer: the layer.
        kv: its tensors. Codes have the layout [block, token, head, dim].
        dtype: of keys and values, as they are read.
        head_axis: of the block layout; 1: [block, head, token, dim].
    """
    if head_axis == 1:
        return _HeadFirstEntries(*kv)
    found = coded(kv, layer)
    if found is not None:
        return _CodedEntries(found, dtype)
    keys, values = (x.view(-1, layer.num_kv_heads, layer.head_dim) for x in kv)
    return _PlainEntries(keys, values)


class _PlainEntries(NamedTuple):
    """Entries in the dtype of activations. Tensors are [KV slots, kv heads, dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        put(self.keys, slots, k)
        put(self.values, slots, v)
        return k, v

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        return take(self.keys, slots), take(self.values, slots)


class _HeadFirstEntries(NamedTuple):
    """Plain entries in blocks [blocks, kv heads, tokens, dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block, offset = self._places(slots)
        self.keys[block, :, offset], self.values[block, :, offset] = k, v
        return k, v

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        block, offset = self._places(slots)
        return self.keys[block, :, offset], self.values[block, :, offset]

    def _places(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block of each slot, and the place in it."""
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=self.keys.device)
        size = self.keys.shape[2]
        return slots // size, slots % size


class _CodedEntries:
    """Codes and their scales."""

    def __init__(self, blocks: Coded, dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype

    def write(self, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self._blocks
        return (
            self._write(blocks.keys, blocks.key_scales, slots, k),
            self._write(blocks.values, blocks.value_scales, slots, v),
        )

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self._blocks
        return self._read(blocks.keys, blocks.key_scales, slots), self._read(
            blocks.values, blocks.value_scales, slots
        )

    def _write(
        self, codes: torch.Tensor, scales: torch.Tensor, slots: Slots, x: torch.Tensor
    ) -> torch.Tensor:
        new, scale = round_heads(x, codes.dtype, scales[0, 0] if self._blocks.static else None)
        put(_as_bytes(codes), slots, new.view(torch.uint8))
        if not self._blocks.static:
            put(scales.flatten(0, 1), slots, scale)
        return self._numbers(new, scale)

    def _read(self, codes: torch.Tensor, scales: torch.Tensor, slots: Slots) -> torch.Tensor:
        found = take(_as_bytes(codes), slots).view(codes.dtype)
        scale = scales[0, 0] if self._blocks.static else take(scales.flatten(0, 1), slots)
        return self._numbers(found, scale)

    def _numbers(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.float() * scale).to(self._dtype)


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return codes by KV slot as bytes, because torch cannot index 8-bit floats."""
    return codes.view(torch.uint8).flatten(0, 1)


def put(blocks: torch.Tensor, slots: Slots, new: torch.Tensor) -> None:
    """Write `new` [n, heads, dim] into `blocks` [all slots, heads, dim]."""
    if isinstance(slots, slice):
        blocks[slots] = new
    else:
        blocks.index_copy_(0, slots, new)


def take(blocks: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Return the entries of `slots`: a view of a range, else a copy."""
    return blocks[slots] if isinstance(slots, slice) else blocks.index_select(0, slots)
