"""Microseconds to sample a token for each row, by CUDA graph replay, for all kinds of sampling parameters.

    python benchmarks/sampling.py [--json PATH]

Logits are bfloat16. `flat` logits resemble those of a model with random weights (normal, sigma 0.64), `peaked` ones
those of a trained model (Zipf, most of the mass in a few hundred tokens). Each call is one captured `choose` for rows
of one kind, over several sets of logits. Bytes are those of one read of the logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from fused import CUDA, copies, microseconds
from torch import Tensor

from quire.sampling.sampler import Sampler
from quire.types import EngineRequest, SamplingParams

VOCABS = (151936, 128256)
ROWS = (1, 16, 64, 256, 1024)
KINDS = {
    "greedy": dict(temperature=0.0),
    "plain": dict(temperature=0.6),
    "top_k 50, top_p 0.95": dict(temperature=0.6, top_k=50, top_p=0.95),
    "top_p 0.95": dict(temperature=0.6, top_p=0.95),
    "top_k 1000": dict(temperature=1.0, top_k=1000),
    "top_k 20000": dict(temperature=1.0, top_k=20000),
    "min_p 0.05": dict(temperature=0.6, min_p=0.05),
    "mixed": None,  # every kind above in turn
}


class Columns:
    def __init__(self, slots: int) -> None:
        self.tokens = torch.zeros(slots, 32, dtype=torch.int32, device=CUDA)
        self.num_tokens = torch.arange(slots, dtype=torch.int32, device=CUDA)
        self.prompt_len = torch.ones_like(self.num_tokens)


def flat(rows: int, vocab: int) -> Tensor:
    return (0.64 * torch.randn(rows, vocab, device=CUDA)).bfloat16()


def peaked(rows: int, vocab: int) -> Tensor:
    ranks = torch.rand(rows, vocab, device=CUDA).argsort(1) + 1.0
    return (-1.2 * ranks.log() + 0.8 * torch.randn(rows, vocab, device=CUDA) + 15).bfloat16()


def sampler_of(kinds: list[dict], vocab: int) -> Sampler:
    sampler = Sampler(Columns(len(kinds)), vocab, len(kinds), CUDA)
    for slot, kind in enumerate(kinds):
        sampler.admit(slot, EngineRequest("r", [1], SamplingParams(**kind), seed=slot))
    sampler.flush()
    return sampler


def measure(name: str, rows: int, vocab: int, sets: list[Tensor]) -> float:
    kind = KINDS[name]
    every = [k for k in KINDS.values() if k is not None]
    kinds = [every[i % len(every)] if kind is None else kind for i in range(rows)]
    sampler = sampler_of(kinds, vocab)
    slots = torch.arange(rows, device=CUDA)
    tokens = torch.empty(rows, dtype=torch.int32, device=CUDA)
    filtered = sampler.has_filters(np.arange(rows))
    return microseconds([lambda x=x: sampler.choose(x, slots, tokens, filtered) for x in sets])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    results = []
    print(f"{'logits':8s}{'vocab':>8s}{'rows':>6s}  " + "".join(f"{name:>22s}" for name in KINDS))
    for vocab in VOCABS:
        for make in (flat, peaked):
            for rows in ROWS:
                sets = [make(rows, vocab) for _ in copies(rows * vocab * 2)]
                times = {name: measure(name, rows, vocab, sets) for name in KINDS}
                results.append({"logits": make.__name__, "vocab": vocab, "rows": rows, "us": times})
                print(
                    f"{make.__name__:8s}{vocab:8d}{rows:6d}  "
                    + "".join(f"{t:22.2f}" for t in times.values()),
                    flush=True,
                )
                del sets
    if args.json:
        conditions = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "logits": "bfloat16",
            "timing": "median of 7 replays of a graph of 48 calls or more",
        }
        args.json.write_text(json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
