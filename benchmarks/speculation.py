"""Throughput of speculative decoding with a drafter of set acceptance, compared with plain decoding.

    python benchmarks/speculation.py [--shape Llama-3.1-8B] [--seconds 100] [--out FILE]

The model has random weights in its true shape and a final norm of zeros, so every greedy token is 0. A drafter that
guesses 0 with probability p therefore has acceptance p, and everything else is real work. Each case decodes `batch`
requests of 128 prompt tokens to `TOKENS` more, and counts from the step in which all have their first token.
`--shape demo` runs the built-in model with its draft model and with prompt lookup instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES

import quire.rank
from quire import LLM, EngineConfig
from quire.core.draft_depth import AdaptiveDepth, DraftDepth, FixedDepth, NoDrafts
from quire.core.engine import Engine
from quire.host import build_engine
from quire.speculation.drafter import DraftContext, Drafter, DraftRows, Speculation
from quire.types import EngineRequest, SamplingParams

PROMPT, TOKENS, MOST = 128, 256, 5
BATCHES = (1, 8, 32, 128)


class CoinDrafter(Drafter):
    """Drafts that are right with a set probability, independently for each position."""

    def __init__(self, context: DraftContext) -> None:
        self._columns, device = context.columns, context.device
        self.share = torch.zeros(1, dtype=torch.int64, device=device)  # of 2^16
        self._offset = torch.arange(16, device=device)

    def propose(self, rows: DraftRows) -> None:
        slots = rows.slots.long().unsqueeze(1)
        place = self._columns.num_tokens[slots] + self._offset[: rows.most]
        coin = (slots * 0x9E3779B1 + place * 0x85EBCA77) & 0xFFFFFFFF
        for factor in (0x7FEB352D, 0x846CA68B):
            coin = ((coin ^ (coin >> 15)) * factor) & 0xFFFFFFFF
        coin >>= 16
        self._columns.tokens[slots, place] = (coin >= self.share).int()


def build(shape: str, folder: Path) -> tuple[Engine, list[CoinDrafter]]:
    """Return an engine of `shape` whose greedy tokens are all 0, and its drafters."""
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "max_position_embeddings": 4096}))
    models: list[Any] = []
    drafters: list[CoinDrafter] = []
    load = quire.rank.load_model

    def keep(*args: Any, **kwargs: Any) -> Any:
        model, checkpoint = load(*args, **kwargs)
        models.append(model)
        return model, checkpoint

    def make(context: DraftContext) -> CoinDrafter:
        drafters.append(CoinDrafter(context))
        return drafters[-1]

    quire.rank.load_model = keep
    quire.rank.pick_speculation = lambda config, load: Speculation(make, MOST)
    config = EngineConfig(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, spec_method="ngram", spec_tokens=MOST,
        max_num_seqs=256, prefix_caching=False,
    )  # fmt: skip
    engine, _ = build_engine(config)
    with torch.inference_mode():
        models[0].norm.weight.zero_()
    return engine, drafters


def decode(engine: Engine, batch: int) -> dict[str, Any]:
    """Decode `batch` requests and return rate, step time and acceptance."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    run = time.monotonic_ns()
    for i in range(batch):
        prompt = [1 + (i * 31 + j) % 99 for j in range(PROMPT)]
        engine.add(EngineRequest(f"{run}-{i}", prompt, params))
    got: dict[str, int] = {}
    while len(got) < batch:
        for output in engine.step():
            got[output.id] = got.get(output.id, 0) + len(output.token_ids)
    totals = engine.log.totals
    names = "steps", "generated_tokens", "draft_rows", "draft_tokens", "accepted_tokens"
    before = [getattr(totals, name) for name in names]
    begin = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            assert not any(output.token_ids), "a token other than 0"
    took_s = time.perf_counter() - begin
    steps, tokens, rows, drafted, accepted = (
        getattr(totals, name) - value for name, value in zip(names, before)
    )
    middle = engine.log.newest(min(steps, 64))[: max(1, min(steps, 64) // 2)]
    return {
        "tokens_per_s": tokens / took_s,
        "steps": steps,
        "tokens_per_step_and_row": tokens / steps / batch,
        "step_ms": 1e3 * statistics.median(record.took_s for record in middle),
        "depth": drafted / max(1, rows),
        "accepted_share": accepted / max(1, drafted),
    }


def cases() -> list[tuple[str, DraftDepth, float]]:
    """Return the name, the depth and the acceptance of each case."""
    fixed = [(f"fixed {k}", FixedDepth(k), 0.8) for k in (5, 3)]
    depth = AdaptiveDepth(MOST)  # one for all, because it has to learn step times only once
    adaptive = [("adaptive", depth, p) for p in (0.8, 0.3, 0.0, 0.6, 0.95)]
    return [("plain", NoDrafts(), 0.0), *fixed, *adaptive]


def demo_rows() -> list[dict[str, Any]]:
    """Return the rates of the built-in model at batch 1 and 8, plain, with its draft model, and with prompt lookup."""
    rows: list[dict[str, Any]] = []
    draft = {"spec_method": "draft", "spec_model": "demo-draft", "spec_tokens": 4}
    for settings in ({}, draft, {**draft, "spec_adaptive": False}, {"spec_method": "ngram"}):
        with LLM("demo", max_model_len=512, **settings) as llm:
            for batch in (1, 8):
                params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
                prompts = [f"The story of the {animal}." for animal in ("dog", "cat", "cow", "owl") * 2][
                    :batch
                ]
                took_s = 0.0
                for _ in range(4):
                    begin = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    took_s = time.perf_counter() - begin
                totals = llm.client.engine.log.totals
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                rows.append(
                    {"model": "demo", **settings, "batch": batch, "tokens_per_s": tokens / took_s,
                     "accepted_share": totals.accepted_tokens / max(1, totals.draft_tokens)}
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.1-8B", choices=[*sorted(SHAPES), "demo"])
    parser.add_argument("--seconds", type=float, default=100.0, help="start no case after so many seconds")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "speculation.json")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.shape == "demo":
        args.out.write_text(json.dumps(demo_rows(), indent=1))
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, drafters = build(args.shape, Path(folder))
        print(f"built in {time.monotonic() - begin:.1f} s", flush=True)
        for batch in BATCHES:
            plain = 0.0
            for name, depth, p in cases():
                if time.monotonic() - begin > args.seconds:
                    break
                try:
                    engine.scheduler.depth = depth
                    for drafter in drafters:
                        drafter.share.fill_(int(p * 65536))
                    if p in (0.0, 0.8):
                        decode(engine, batch)  # captures its steps
                    result = decode(engine, batch)
                except Exception:
                    traceback.print_exc()
                    continue
                plain = plain or result["tokens_per_s"]
                row = {"batch": batch, "case": name, "p": p, "gain": result["tokens_per_s"] / plain, **result}
                results.append(row)
                print(
                    *(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                    flush=True,
                )
                args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
