"""A test-only runner of models over whole sequences: contiguous attention, no cache, no engine."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.assembly.stages import held_elsewhere
from quire.attention.base import ForwardBatch
from quire.attention.whole import WholeSequenceAttention, sequences_batch
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


def whole_batch(rows: list[list[int]], model: Model | None = None) -> ForwardBatch:
    """Build a ragged batch of whole sequences, with the states that layers of `model` keep."""
    batch = sequences_batch(rows)
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
