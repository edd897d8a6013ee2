"""`calibrated_int4`: int4 weights of a checkpoint, rounded for the inputs that its layers get on a text.

One layer is in memory at a time. It runs twice: with plain weights, while the moments of its products' inputs are
summed, and with the rounded ones, whose outputs are the inputs of the next layer. So later layers compensate the errors
of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.attention.whole import WholeSequenceAttention, sequences_batch
from quire.layers.env import Env, StoredShape
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.config.load import load_spec
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel
from quire.parallel.stage import Stage
from quire.quant.base import Matmul
from quire.quant.export import int4_tensors
from quire.quant.gptq import InputMoments, round_by_hessian
from quire.types import ModelError

_MOST_TOKENS = 2048  # that run at once
_ALL = slice(None)


class _InputObserver:
    """Wraps the products of a layer, and sums the moments of their inputs by the names of their weights."""

    def __init__(self, wanted: set[str], device: torch.device) -> None:
        self.wanted, self.device = wanted, device
        self.moments: dict[str, InputMoments] = {}

    def wrap(self, names: tuple[str, ...], product: Matmul) -> Matmul:
        """Return the product, observed if any of its weights is wanted."""
        if not self.wanted.intersection(names):
            return product

        def observed(x: torch.Tensor) -> torch.Tensor:
            if names[0] not in self.moments:
                shared = InputMoments(x.shape[1], self.device)
                self.moments |= dict.fromkeys(names, shared)
            self.moments[names[0]].add(x.to(self.device))
            return product(x)

        return observed


class _RoundedWeights:
    """A checkpoint in which some weights are replaced by other values."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, values: dict[str, torch.Tensor]) -> None:
        self.checkpoint, self.values = checkpoint, values

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _ALL, cols: slice = _ALL
    ) -> torch.Tensor:
        if name in self.values:
            return self.values[name][rows, cols]
        return self.checkpoint.tensor(name, shape, rows, cols)

    def copy_into(self, destination: torch.Tensor, *args: Any) -> None:
        destination.copy_(self.tensor(*args))

    def stored(self, name: str) -> StoredShape | None:
        return self.checkpoint.stored(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)


def calibrated_int4(
    folder: Path,
    wanted: set[str],
    rows: list[list[int]],
    group_size: int,
    device: torch.device,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the stored tensors of each weight, by its name and the end of theirs.

    Weights that are not observed (experts, and `kv_b_proj` of latent attention) are left out.

    Args:
        folder: config.json and safetensors files with plain weights.
        wanted: names of the weights.
        rows: sequences of token ids.
        group_size: columns with a common scale.
        device: where Hessians are summed and numbers are rounded; layers run on the CPU.
        progress: called with the name of each weight that is done.

    Raises:
        ModelError: if there are no tokens, or the model has layers that cannot be run by themselves.
    """
    spec = load_spec(folder)
    if spec.mixer is not None or len(set(map(spec.kv_source, range(spec.num_layers)))) < spec.num_layers:
        raise ModelError(
            f"{spec.architecture} cannot be calibrated: its layers keep states, or share keys and values"
        )
    rows = [row for row in rows if row]
    if not rows:
        raise ModelError("the calibration file holds no text")
    batches = _batches(rows)
    checkpoint = SafetensorsCheckpoint(folder, tied=True)
    states = [torch.empty(sum(map(len, batch)), spec.hidden_size) for batch in batches]
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        for index in range(spec.num_layers):
            observer = _InputObserver(wanted, device)
            _run(spec, checkpoint, index, batches, states, observer)
            rounded: dict[str, torch.Tensor] = {}
            for name, moments in observer.moments.items():
                if name not in wanted:
                    continue
                shape = checkpoint.stored(name)
                assert shape is not None
                weight = checkpoint.tensor(name, shape.shape).to(device)
                scale, codes = round_by_hessian(weight, moments.hessian, group_size)
                found[name] = {end: tensor.cpu() for end, tensor in int4_tensors(scale, codes).items()}
                values = (codes.float() - 8).unflatten(1, (-1, group_size)) * scale.float().unsqueeze(-1)
                rounded[name] = values.flatten(1).cpu()
                progress(name)
            following = _run(spec, _RoundedWeights(checkpoint, rounded), index, batches, states, None)
            states = following
    finally:
        checkpoint.close()
    return found


def _batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """Group sequences into batches of at most `_MOST_TOKENS` tokens; longer sequences are cut."""
    batches: list[list[list[int]]] = []
    room = 0
    for row in rows:
        row = row[:_MOST_TOKENS]
        if len(row) > room:
            batches.append([])
            room = _MOST_TOKENS
        batches[-1].append(row)
        room -= len(row)
    return batches


@torch.inference_mode()
def _run(
    spec: ModelSpec,
    weights: Any,
    index: int,
    batches: list[list[list[int]]],
    states: list[torch.Tensor],
    observer: _InputObserver | None,
) -> list[torch.Tensor]:
    """Run layer `index` of fp32 weights on the states of all batches, and return the next ones."""
    incoming, outgoing = (torch.empty(_MOST_TOKENS, spec.hidden_size) for _ in range(2))
    # One stage more than layers, so that no stage has the head.
    stage = Stage(index, spec.num_layers + 1, index, index + 1, incoming, outgoing)
    env = Env(weights, Parallel(), WholeSequenceAttention(), torch.device("cpu"), torch.float32, stage=stage)
    if observer is not None:
        env = replace(env, observe=observer.wrap)
    model, following = build_model(spec, env), []
    for batch, state in zip(batches, states):
        incoming[: len(state)] = state
        following.append(model(sequences_batch(batch)).clone())
    return following
