"""The interface between models and attention: `ForwardBatch` is a model's view of a step.

A batch is ragged: row r owns the tokens query_start[r] .. query_start[r + 1] of the flat token axis. There is no
separate prefill or decode path: a row is n new tokens that follow seq_len - n older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from quire.attention.expansion_rule import ExpansionRule
from quire.types import KVLayout

# The tensors of one layer's `KVLayout`, in the back end's block layout: keys and values in most layers.
KV = tuple[torch.Tensor, ...]
# The tensors of one layer's `StateLayout`, each [state rows, *shape].
States = tuple[torch.Tensor, ...]
Tokens = torch.Tensor | slice  # indices of some of a step's tokens, int64

_NO_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class ForwardBatch:
    """One step: views into static device buffers, and bounds known to the host. `attn` belongs to the back end.

    If `num_tokens` is None, the host knows only the shapes, which are upper bounds: a captured graph serves any
    mix of up to that many rows and tokens. Unused rows have no tokens (query_start repeats its last value). Tokens
    behind the last row have KV slot -1 and any valid position, and their results are meaningless.
    """

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    # int64 [tokens]: where each new key and value goes, block * block_size + offset; -1: nowhere.
    kv_slots: torch.Tensor
    query_start: torch.Tensor  # int32 [rows + 1]
    seq_lens: torch.Tensor  # int32 [rows], including the new tokens
    # int32 [slots, blocks], of all request slots; the last dimension is contiguous. Entries before the window of all
    # layers that use the table are any block's.
    block_table: torch.Tensor
    slots: torch.Tensor  # int64 [rows]: each row's request slot, which is its row of the block table
    logit_index: torch.Tensor  # int64 [logit rows]: tokens whose hidden states become logits
    kv: list[KV]  # by layer index
    num_tokens: np.ndarray | None  # host, int32 [rows]: new tokens per row; None: only bounds are known
    seq_bounds: np.ndarray  # host, int32 [rows]: upper bounds of seq_lens
    block_size: int
    # int64 [n]: the tokens whose hidden states the model must return, in this order; None: all tokens.
    wanted: torch.Tensor | None = None
    # int32 [rows]: how many of a row's first tokens lie in blocks shared with other rows (0: none). All values
    # other than 0 are equal and mean the same blocks. Set only if every row has one token.
    shared: torch.Tensor | None = None
    decode_tokens: int = 1  # most new tokens of a row that decodes: 1 + its draft tokens
    decodes_only: bool = False  # no row has more tokens than that
    brief: bool = False  # the rows' contexts are as short as the model's `brief` steps have them
    attn: Any = field(default=None)
    # The same step for further groups of layers, which have their own block_table, kv_slots and attn.
    others: list[ForwardBatch] = field(default_factory=list)
    group_of: Sequence[int] = ()  # by layer, if there are others: 0 for this batch, 1 for others[0], ...
    # What layers with a recurrence keep of requests, by layer index; empty if no layer does. A layer reads the state
    # of each row from its state row, unless the row is fresh, and writes the state after its last token there.
    states: list[States] = field(default_factory=list)
    state_rows: torch.Tensor = _NO_ROWS  # int64 [rows]
    fresh: torch.Tensor = _NO_ROWS  # bool [rows]: nothing is computed, so the state counts as zeros
    # int64 [tokens]: state row for the state after each token, -1 for none; None: only the one after the last token of
    # each row is kept, in its row.
    state_targets: torch.Tensor | None = None

    # int32 [tokens, k]: positions that the tokens attend to in layers with sparse attention, then -1; None: to all.
    # A layer with an indexer sets it, and the layers behind it read it.
    chosen: torch.Tensor | None = None

    def for_layer(self, index: int) -> ForwardBatch:
        """Return the step as the back end of layer `index` sees it, with the block table of the layer's group."""
        if not self.others or not (group := self.group_of[index]):
            return self
        return self.others[group - 1]

    def add_group(self, block_table: torch.Tensor, kv_slots: torch.Tensor) -> None:
        """Add a group of layers with these blocks."""
        self.others.append(replace(self, block_table=block_table, kv_slots=kv_slots, others=[]))

    def plan(self, backend: AttentionBackend) -> None:
        """Let the back end plan the step, for all groups at once if it does not plan by blocks."""
        self.attn = backend.plan(self)
        for other in self.others:
            other.attn = backend.plan(other) if backend.plans_blocks else self.attn

    def narrow(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of `x` and `residual` that the last layer needs behind its attention.

        From there on, a token's result depends on no other token.
        """
        if self.wanted is None:
            return x, residual
        return x.index_select(0, self.wanted), residual.index_select(0, self.wanted)


class KVLayer(Protocol):
    """A layer with entries in the KV cache."""

    index: int
    kv: KVLayout  # what the layer keeps of each token


class AttentionLayer(KVLayer, Protocol):
    """A layer's properties that a back end reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # A token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
    window: int | None
    # The context is cut into chunks of `window` tokens, and a token attends to those before it in its chunk.
    chunked: bool
    soft_cap: float | None  # a score s becomes cap * tanh(s / cap); None: off
    # float32 [heads]: scores without a key, which join the sum of the softmax; None: off
    sinks: torch.Tensor | None
    span: int  # distance between the two dimensions of a rotated pair; 0: half a head
    # float32 [kv heads] each: scales of the codes of keys and values, if they are static; None: in the KV cache, or none
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None


class LatentNorm(Protocol):
    """RMS norm of latents."""

    weight: torch.Tensor  # [rank]
    eps: float


class Angles(Protocol):
    """The rotation of a step's tokens."""

    table: torch.Tensor  # cos | sin, [positions, rotary dim]

    def select(self, tokens: Tokens) -> Angles:
        """Return the rotation of some of the tokens."""
        ...


class Expansion(Protocol):
    """The map from latents to keys and values of all heads (`LatentExpansion` in layers/mla.py)."""

    content_dim: int  # of a head's key, without the rotated part
    value_dim: int

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Return [n, heads, content dim + value dim] for latents [n, rank]."""
        ...

    def absorb(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries of entries [tokens, heads, dim] for queries of keys, and the part of the latter to rotate."""
        ...

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads * value dim] for weighted sums of latents [tokens, heads * rank]."""
        ...


class LatentLayer(KVLayer, Protocol):
    """A layer with one KV head, whose values are the first `rank` numbers of its keys (layers/mla.py).

    Its only KV tensor holds an entry [dim] per token: a normed latent [rank] and a rotated key [dim - rank].
    """

    num_heads: int
    dim: int
    rank: int
    scale: float
    span: int  # distance between the two dimensions of a rotated pair

    @property
    def expansion(self) -> Expansion:
        """Return the map to keys and values of all heads."""
        ...

    @property
    def norm(self) -> LatentNorm:
        """Return the norm of latents."""
        ...

    def prepare(
        self, q: torch.Tensor, rotary: torch.Tensor, entries: torch.Tensor, angles: Any
    ) -> torch.Tensor:
        """Complete the queries and return the entries to store, in plain PyTorch.

        Args:
            q: [tokens, heads, any dim]; the rotated `rotary` is written to the last numbers of each head.
            rotary: [tokens, heads, dim - rank].
            entries: [tokens, dim], not yet normed and rotated.
            angles: the argument of `forward_latent`.
        """
        ...


class IndexLayer(KVLayer, Protocol):
    """A layer with an indexer (layers/indexer.py). The second of its KV tensors holds an index key [dim] per token."""

    dim: int
    top_k: int


class HeadNorms(Protocol):
    """RMS norms of the q and k heads."""

    weight: torch.Tensor  # [q heads + kv heads, dim]
    eps: float


class PackedForward(Protocol):
    """Norm, rotation and attention of packed q|k|v in one call."""

    def __call__(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        table: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Apply the norms to q and k, rotate them to `batch.positions` (layers/rope.py), and attend.

        Args:
            layer: the calling layer.
            qkv: packed q|k|v, [tokens, (heads + 2 kv heads) * dim]; may be overwritten.
            norms: norms of the q and k heads; None: no norms.
            table: cos | sin, [positions, dim].
            batch: the step.

        Returns:
            [tokens, heads * dim].
        """
        ...


class AttentionBackend(Protocol):
    """An implementation of paged attention: write the new keys and values, then attend over each row's blocks.

    Rows may run in any order, because no row reads what another row of the same batch writes.
    """

    name: str
    capturable: bool  # whether plan and forward can be captured in a CUDA graph, with bounds only
    reads_shared: bool  # whether it uses `ForwardBatch.shared`
    plans_blocks: bool  # whether the result of `plan` depends on the block table
    rule: ExpansionRule  # which rows attend to expanded latents; a step with such rows cannot be captured

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int, /) -> tuple[int, ...]:
        """Return the shape of the blocks of one tensor of a layer (`KVTensor`)."""
        ...

    def plan(self, batch: ForwardBatch) -> Any:
        """Compute the step's metadata for all layers from host bounds, without reading a device value."""
        ...

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Write k and v, and attend.

        Args:
            layer: the calling layer.
            q: [tokens, heads, dim].
            k, v: [tokens, kv heads, dim]; None if an earlier layer of the same index has written them.
            batch: the step.

        Returns:
            [tokens, heads * dim].
        """
        ...

    @property
    def forward_packed(self) -> PackedForward | None:
        """Return a function for norm, rotation, KV write and attention in one call; None if they cannot be fused."""
        ...

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Complete queries and entries as `LatentLayer.prepare` does, write the entries, and attend.

        Args:
            layer: the calling layer.
            q: [tokens, heads, content dim + rotary dim], before rotation; the last dimension is contiguous.
            entries: [tokens, dim], before norm and rotation; the last dimension is contiguous.
            angles: of the tokens.
            batch: the step.
            chosen: int32 [tokens, k], positions that each token attends to, then -1; None: to all up to its own.

        Returns:
            [tokens, heads * value dim].
        """
        ...

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """Write the index keys, and return the positions with the largest index scores.

        The score of a key k is the sum over the heads h of weights[h] * max(q[h] . k, 0).

        Args:
            layer: the calling layer.
            q: [tokens, heads, dim].
            keys: [tokens, dim].
            weights: float32 [tokens, heads].
            batch: the step.

        Returns:
            int32 [tokens, top_k]: positions from 0 up to the token's own, each once, then -1; None if no row of the
            step has more than `top_k` tokens, so that all are chosen.
        """
        ...


class NoLatents:
    """The part of a back end that computes neither latent nor sparse attention: assembly/parts.py refuses the models."""

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise NotImplementedError("assembly/parts.py refuses models with latent attention")

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        raise NotImplementedError("assembly/parts.py refuses models with sparse attention")
