"""`Stage`: a rank's place in a pipeline, and the buffers through which hidden states enter and leave it.

A pipeline of one stage is the degenerate case: it holds every layer, and nothing enters or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def _nothing() -> torch.Tensor:
    return torch.empty(0)


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`, with the layers of the model from `begin` to `end` - 1.

    The first stage also has the embedding, the last one the final norm and the head. The buffers belong to the link
    between stages (pipeline.py), which fills `incoming` before the model runs and sends `outgoing` afterwards.
    """

    index: int = 0
    count: int = 1
    begin: int = 0
    end: int | None = None  # None: the last layer of the model is in this stage
    incoming: torch.Tensor = field(default_factory=_nothing)  # [most tokens, hidden]
    outgoing: torch.Tensor = field(default_factory=_nothing)

    @property
    def is_first(self) -> bool:
        """Return whether the stage starts with token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage computes the logits."""
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Return the indices of this stage's layers in a model of `total` layers."""
        return range(self.begin, total if self.end is None else self.end)

    def entered(self, tokens: int) -> torch.Tensor:
        """Return the states [tokens, hidden] from the stage in front."""
        return self.incoming[:tokens]

    def hand_over(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Write x + residual, [tokens, hidden], to `outgoing`, and return the part written."""
        out = self.outgoing[: x.shape[0]]
        return out.copy_(x) if residual is None else torch.add(x, residual, out=out)


WHOLE = Stage()


def split_layers(sizes: Sequence[int], first: int, last: int, stages: int) -> tuple[int, ...]:
    """Return how many consecutive layers each stage gets, so that the largest stage is as small as possible.

    Among equally good splits, earlier stages get fewer layers, because the last one also samples.

    Args:
        sizes: bytes of each layer.
        first: bytes that the first stage holds besides layers: the embedding.
        last: bytes that the last stage holds besides layers: the head.
        stages: number of stages, at most the number of layers.
    """
    totals = [0]
    for size in sizes:
        totals.append(totals[-1] + size)
    # best[n]: the least largest stage of the stages so far, and their counts, if they hold the first n layers
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        behind = stages - 1 - stage
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for held, (largest, counts) in best.items():
            for end in range(held + 1, len(sizes) - behind + 1):
                size = max(largest, totals[end] - totals[held] + extra)
                if end not in found or (size, counts) < (found[end][0], found[end][1][:-1]):
                    found[end] = size, (*counts, end - held)
        best = found
    return best[len(sizes)][1]
