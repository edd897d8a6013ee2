"""A test-only runner of models over whole sequences: contiguous attention, no cache, no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.assembly.stages import held_elsewhere
from quire.attention.base import Angles, AttentionLayer, ForwardBatch, IndexLayer, LatentLayer
from quire.attention.reference import first_key
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import open_checkpoint
from quire.models.config.load import load_spec
from quire.models.decoder import Model
from quire.models.registry import build_model
from quire.parallel.experts import ALL_EXPERTS, ExpertExchange, ExpertShard
from quire.parallel.ranks import Parallel
from quire.parallel.stage import WHOLE
from quire.worker.memory.states import StateMemory

ONE_RANK = Parallel()


class WholeSequenceAttention:
    """Attention over rows that start at position 0, so that no keys or values precede the step's."""

    name = "whole"
    forward_packed = None
    reads_shared = False

    def __init__(self) -> None:
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keys and values of a step, by layer

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, heads, dim)

    def plan(self, batch: ForwardBatch) -> Any:
        return None

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if k is None or v is None:
            k, v = self.written[layer.index]
        self.written[layer.index] = k, v
        outs = []
        ends = np.cumsum(batch.num_tokens).tolist()
        for start, end in zip([0, *ends], ends):
            group = layer.num_heads // layer.num_kv_heads
            keys = k[start:end].repeat_interleave(group, 1)
            values = v[start:end].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * layer.scale
            if layer.soft_cap is not None:
                scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
            at = torch.arange(end - start)
            hidden = at[None, :] > at[:, None]
            if layer.window is not None:
                hidden |= at[None, :] < first_key(at[:, None], layer.window, layer.chunked)
            scores = scores.masked_fill(hidden, float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks.view(-1, 1, 1).expand(-1, end - start, 1)
                scores = torch.cat((scores, sinks), -1)
            probs = scores.softmax(-1)[..., : end - start].to(values.dtype)
            outs.append(torch.einsum("hqk,khd->qhd", probs, values).flatten(1))
        return torch.cat(outs)

    def forward_latent(
        self,
        layer: LatentLayer,
        q: torch.Tensor,
        rotary: torch.Tensor,
        entries: torch.Tensor,
        angles: Angles,
        batch: ForwardBatch,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        entries = layer.prepare(q, rotary, entries, angles)
        outs = []
        ends = np.cumsum(batch.num_tokens).tolist()
        for start, end in zip([0, *ends], ends):
            keys = entries[start:end]
            scores = torch.einsum("qhd,kd->hqk", q[start:end], keys) * layer.scale
            at = torch.arange(end - start)
            hidden = at[None, :] > at[:, None]
            if chosen is not None:
                hidden |= ~(at == chosen[start:end, :, None]).any(1)
            probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,kd->qhd", probs, keys[:, : layer.rank]).flatten(1))
        return torch.cat(outs)

    def choose(
        self,
        layer: IndexLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        chosen = torch.full((q.shape[0], layer.top_k), -1, dtype=torch.int32)
        ends = np.cumsum(batch.num_tokens).tolist()
        for start, end in zip([0, *ends], ends):
            for token in range(start, end):
                products = torch.einsum("hd,kd->hk", q[token], keys[start : token + 1]).relu()
                best = (weights[token] @ products).argsort(descending=True)[: layer.top_k]
                chosen[token, : len(best)] = best
        return chosen


def whole_batch(rows: list[list[int]], model: Model | None = None) -> ForwardBatch:
    """Build a ragged batch of whole sequences, with the states that layers of `model` keep."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    empty = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=torch.tensor([t for row in rows for t in row]),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        kv_slots=empty,
        query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths),
        block_table=torch.empty(len(rows), 0, dtype=torch.int32),
        slots=torch.arange(len(rows)),
        logit_index=empty,
        kv=[],
        num_tokens=lengths,
        seq_bounds=lengths,
        block_size=1,
    )
    if model is not None:
        layouts = model.spec.state_layouts("float32", getattr(model, "ranks", 1))
        states = StateMemory(layouts, len(rows), 0, torch.device("cpu"))
        states.attach(batch, torch.zeros(len(rows), dtype=torch.int32))
    return batch


def load_model(
    path: Path,
    dtype: torch.dtype = torch.float32,
    parallel: Parallel = ONE_RANK,
    exchange: ExpertExchange | None = None,
) -> Model:
    """Load the model at `path` on the CPU, and check that it uses every tensor of its checkpoint."""
    spec = load_spec(path)
    experts = ALL_EXPERTS
    if exchange and spec.moe:
        experts = ExpertShard(exchange, parallel.rank, parallel.size, spec.moe.routing.num_experts)
    weights = open_checkpoint(path, spec, elsewhere=held_elsewhere(spec, WHOLE, experts))
    env = Env(weights, parallel, WholeSequenceAttention(), torch.device("cpu"), dtype, experts=experts)
    model = build_model(spec, env)
    model.ranks = parallel.size  # type: ignore[attr-defined]  # whole_batch needs it
    weights.finish()
    return model


@torch.inference_mode()
def logits_of(model: Model, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of every position, by row."""
    flat = model.logits(model(whole_batch(rows, model)))
    return list(flat.split([len(row) for row in rows]))


@torch.inference_mode()
def last_logits(model: Model, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits of each row's last position; the model returns no other hidden states."""
    batch = whole_batch(rows, model)
    batch.wanted = batch.query_start[1:].long() - 1
    return model.logits(model(batch))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """Return `count` greedy tokens, recomputing the whole sequence for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, [tokens])[0][-1].argmax()))
    return tokens[len(prompt) :]
