"""What a model sees of a step (`ForwardBatch`) and what an attention back end must do.

A batch is ragged: row r owns tokens query_start[r] .. query_start[r + 1] of the flat token axis. The
words prefill and decode do not occur: a row is n new tokens that follow seq_len - n older ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

KV = tuple[torch.Tensor, torch.Tensor]  # keys, values of one layer, in the back end's own block layout


@dataclass(slots=True)
class ForwardBatch:
    """Views into one set of static device buffers, plus host-side bounds. `attn` belongs to the back end.

    Bounds only: where `num_tokens` is None the host knows no more than the shapes, and one batch serves
    any mix of up to so many rows and tokens (a captured graph). Rows that are not used have no tokens
    (query_start repeats its last value); tokens past the last row's have the slot -1 and any valid position,
    and what is computed for them means nothing.
    """

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    kv_slots: (
        torch.Tensor
    )  # int64 [tokens]: block * block_size + offset, where each new K/V goes; -1: nowhere
    query_start: torch.Tensor  # int32 [rows + 1]
    seq_lens: torch.Tensor  # int32 [rows], the new tokens included
    block_table: torch.Tensor  # int32 [slots, blocks], of all slots
    slots: torch.Tensor  # int64 [rows]: whose row of the block table is whose
    logit_index: torch.Tensor  # int64 [logit rows]: tokens whose hidden state is wanted as logits
    kv: list[KV]  # by layer index
    num_tokens: np.ndarray | None  # host, int32 [rows]: new tokens per row; None: bounds only
    seq_bounds: np.ndarray  # host, int32 [rows]: at least seq_lens
    block_size: int
    # int64 [n]: the only tokens whose hidden states the model has to return, in this order; None: all of them.
    wanted: torch.Tensor | None = None
    # int32 [rows]: how many of a row's first tokens are in blocks that other rows begin with as well (0: none);
    # every number but 0 is the same, and names the same blocks. Only where each row has one token.
    shared: torch.Tensor | None = None
    attn: Any = field(default=None)

    def narrow(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of both that the last layer goes on with behind its attention: from there on a token's result
        depends on no other token."""
        if self.wanted is None:
            return x, residual
        return x.index_select(0, self.wanted), residual.index_select(0, self.wanted)


class AttentionLayer(Protocol):
    """What a back end needs to know of the layer that calls it."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees itself and the window - 1 before it; None: all before it
    soft_cap: float | None  # scores become cap * tanh(score / cap); None: off


class HeadNorms(Protocol):
    """RMS norms of the q and k heads."""

    weight: torch.Tensor  # [q heads + kv heads, dim]
    eps: float


class PackedForward(Protocol):
    def __call__(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """`AttentionBackend.forward` of q and k that are first normed and turned to batch.positions: see
        layers/rope.py.

        qkv [tokens, (heads + 2 kv heads) * dim], packed q|k|v, may be overwritten; table [positions, dim]:
        cos | sin.
        """
        ...


class AttentionBackend(Protocol):
    """Writes the new K/V into the blocks, then attends over all blocks of each row.

    Rows may run in any order: no row attends over what another row of the batch writes.
    """

    name: str
    capturable: bool  # whether plan and forward may be part of a CUDA graph, bounds only included
    reads_shared: bool  # whether it makes use of `ForwardBatch.shared`

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the key (and of the value) tensor of one layer."""
        ...

    def plan(self, batch: ForwardBatch) -> Any:
        """Per-step metadata, once for all layers; reads host bounds only, never a device value."""
        ...

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv heads, dim] -> [tokens, heads * dim]."""
        ...

    @property
    def forward_packed(self) -> PackedForward | None:
        """Norm, rotation, writing and attention as one; None: not to be had."""
        ...
