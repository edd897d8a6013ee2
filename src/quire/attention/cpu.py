"""CPU back end: a C kernel (kernels/cpu) if every row has one token, else the reference back end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import Angles, AttentionLayer, ForwardBatch, HeadNorms, IndexLayer, LatentLayer
from quire.attention.expansion_rule import NO_EXPANSION
from quire.attention.reference import ReferenceAttention
from quire.kernels.cpu.ops import (
    FORMS,
    CAttend,
    CHeads,
    CNorm,
    CpuKernels,
    address,
    half,
    norm_struct,
    pointer,
)


@dataclass(frozen=True, slots=True)
class _LayerStructs:
    """A layer's C structures, and the Python objects that they point into."""

    heads: CHeads
    norm: CNorm | None
    owners: tuple[AttentionLayer, HeadNorms | None, torch.Tensor]


class CpuAttention:
    """Back end for CPUs: the C kernel for steps with one token a row, the reference for all others."""

    name = "cpu"
    capturable = False
    reads_shared = False
    plans_blocks = True
    rule = NO_EXPANSION

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._reference = ReferenceAttention()
        self._layers: dict[int, _LayerStructs] = {}  # by id of the layer, which the value keeps alive

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return self._reference.kv_shape(num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> Any:
        """Return None if the kernel runs the whole step, else the reference's plan."""
        counts = batch.num_tokens
        return None if counts is not None and (counts == 1).all() else self._reference.plan(batch)

    def forward_packed(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        qkv = qkv.contiguous()
        if batch.attn is not None:
            return self._rotate_and_attend(layer, qkv, norms, table, batch)
        keys, values, *scales = _blocks(layer, batch)
        structs = self._layers.get(id(layer)) or self._describe(layer, norms, table, keys.dtype)
        rows = qkv.shape[0]
        out = qkv.new_empty(rows, layer.num_heads * layer.head_dim)
        arguments = CAttend(
            address(structs.heads), qkv.data_ptr(), batch.positions.data_ptr(), batch.kv_slots.data_ptr(),
            batch.seq_lens.data_ptr(), batch.block_table.data_ptr(), batch.slots.data_ptr(),
            keys.data_ptr(), values.data_ptr(), out.data_ptr(), *map(pointer, scales or (None, None)),
            rows, batch.block_table.stride(0), batch.block_size, layer.num_kv_heads if layer.kv_scales is None else 0,
        )  # fmt: skip
        self._kernels.run(
            self._kernels.attend_rows, arguments, structs, qkv, batch, keys, values, out, scales
        )
        return out

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if batch.attn is None:  # the kernel always rotates; GPT-2's heads are not rotated
            batch.attn = self._reference.plan(batch)
        return self._reference.forward(layer, q, k, v, batch)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if batch.attn is None:  # the kernel reads keys and values of heads only
            batch.attn = self._reference.plan(batch)
        return self._reference.forward_latent(layer, q, entries, angles, batch, chosen)

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        if batch.attn is None:
            batch.attn = self._reference.plan(batch)
        return self._reference.choose(layer, q, keys, weights, batch)

    def _rotate_and_attend(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
        self._kernels.norm_rotate_(qkv, batch.positions, table, weight, eps, heads + kv_heads, layer.span)
        q, k, v = qkv.view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], 1)
        return self.forward(layer, q, k, v, batch)

    def _describe(
        self, layer: AttentionLayer, norms: HeadNorms | None, table: torch.Tensor, stored: torch.dtype
    ) -> _LayerStructs:
        norm = None if norms is None else norm_struct(norms.weight, None, norms.eps)
        heads = CHeads(
            address(norm), table.data_ptr(), layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window or 0,
            layer.span or layer.head_dim // 2, pointer(layer.sinks), layer.scale, layer.soft_cap or 0.0, half(table),
            FORMS.get(stored, 0), layer.chunked,
        )  # fmt: skip
        self._layers[id(layer)] = structs = _LayerStructs(heads, norm, (layer, norms, table))
        return structs


def _blocks(layer: AttentionLayer, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    """Return the blocks of keys and values, followed by their scales if they are codes."""
    kv = batch.kv[layer.index]
    return kv if layer.kv_scales is None else (*kv, *layer.kv_scales)
