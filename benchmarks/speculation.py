"""Throughput of speculative decoding with random weights in the true shape, compared with plain decoding.

    python benchmarks/speculation.py [--shape Llama-3.1-8B] [--seconds 100] [--parts small,fp8,copy] [--out FILE]

Parts, each with an engine of its own, and each case a row of the JSON:

    small, large   drafters of set acceptance p at batch 1, 8, 32 and 64, 128, 256: fixed and adaptive depth
    fp8            the same at batch 1 with FP8 weights
    copy           prompt lookup while requests edit a file
    eagle3         time that an EAGLE-3 head with random weights adds to a step
    demo           the built-in model with its draft model

For drafters of set acceptance the final norm is zero, so that every greedy token is 0: a drafter that guesses 0 with
probability p has acceptance p, and everything else is real work. For `copy` the logits of the model are overridden, so
that each answer is the file of its prompt with one name replaced; the lookup itself is real.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from drafters import CoinDrafter, EditDrafter, ForcedModel, edits
from shapes import SHAPES, eagle3_head

import quire.rank
from quire import LLM, EngineConfig
from quire.core.draft_depth import AdaptiveDepth, DraftDepth, FixedDepth, NoDrafts
from quire.core.engine import Engine
from quire.host import build_engine
from quire.speculation.drafter import Drafter, Speculation
from quire.types import EngineRequest, SamplingParams

PROMPT, TOKENS, MOST = 128, 256, 5
COUNTED = "steps", "generated_tokens", "draft_rows", "draft_tokens", "accepted_tokens"
Row = dict[str, Any]


class Deadline(Exception):
    """The time of the benchmark is up."""


class Clock:
    """The time that is left. `check` raises Deadline once it is up."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._seconds = time.monotonic(), seconds

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begin

    def check(self) -> None:
        if self.spent_s > self._seconds:
            raise Deadline


# ------------------------------------------------------------------------------------------ engines


@contextmanager
def engine_of(
    shape: str, make: Speculation | None, zero_norm: bool = True, **settings: Any
) -> Iterator[Engine]:
    """Build an engine of `shape` with random weights, and close it afterwards.

    Args:
        shape: name in `SHAPES`.
        make: its drafts; None are those of the settings.
        zero_norm: let all greedy tokens be 0.
        settings: of `EngineConfig`.
    """
    load, pick, models = quire.rank.load_model, quire.rank.pick_speculation, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        models.append(load(*args, **kwargs))
        return models[-1]

    quire.rank.load_model = keep
    if make is not None:
        quire.rank.pick_speculation = lambda config, loader: make
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[shape], "max_position_embeddings": 4096}
        Path(folder, "config.json").write_text(json.dumps(config))
        fixed: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "spec_method": "ngram", "spec_tokens": MOST,
            "max_num_seqs": 256, "max_model_len": 512, "capture_at_start": False,
        }  # fmt: skip
        try:
            engine, _ = build_engine(EngineConfig(model=folder, **{**fixed, **settings}))
        finally:
            quire.rank.load_model, quire.rank.pick_speculation = load, pick
    if zero_norm:
        with torch.inference_mode():
            models[0][0].norm.weight.zero_()
    try:
        yield engine
    finally:
        engine.close()
        models.clear()
        gc.unfreeze()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode(engine: Engine, prompts: list[list[int]], tokens: int = TOKENS) -> Row:
    """Decode `tokens` tokens behind each prompt. Return rates, step time and acceptance.

    The clock begins with the step in which all requests have their first token. `tokens_per_s` is that of the full
    batch: until the first request ends. `drained_tokens_per_s` is that of all tokens, also with fewer requests left.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    run = time.monotonic_ns()
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(f"{i}-{run}", prompt, params))
    started: set[str] = set()
    while len(started) < len(prompts):
        started.update(output.id for output in engine.step())
    begin, before = time.perf_counter(), counters(engine)
    full: tuple[float, list[int]] | None = None
    while engine.has_work:
        outputs = engine.step()
        assert not any(output.error for output in outputs)
        if full is None and any(output.finish_reason for output in outputs):
            full = time.perf_counter() - begin, counters(engine)
    took_s = time.perf_counter() - begin
    assert full is not None
    made = counters(engine)[1] - before[1]
    steps, full_made, rows, drafted, accepted = (a - b for a, b in zip(full[1], before))
    newest = engine.log.newest(max(1, counters(engine)[0] - before[0]))[: max(1, steps)]
    middle = newest[len(newest) // 8 : max(1, len(newest) * 7 // 8)] or newest
    return {
        "tokens_per_s": full_made / full[0],
        "drained_tokens_per_s": made / took_s,
        "steps": steps,
        "tokens_per_step_and_row": full_made / max(1, steps) / len(prompts),
        "step_ms": 1e3 * statistics.median(record.took_s for record in middle),
        "depth": drafted / max(1, rows),
        "accepted_share": accepted / max(1, drafted),
    }


def counters(engine: Engine) -> list[int]:
    """Return the counters of the engine named in `COUNTED`."""
    return [getattr(engine.log.totals, name) for name in COUNTED]


def prompts_of(batch: int) -> list[list[int]]:
    """Return `batch` different prompts of `PROMPT` tokens."""
    return [[1 + (i * 31 + j) % 99 for j in range(PROMPT)] for i in range(batch)]


def warm_up(engine: Engine, prompts: list[list[int]], depths: range, tokens: int = 16) -> list[float]:
    """Capture the steps of these depths. Return the usual duration of each in ms."""
    times_ms = []
    for depth in depths:
        engine.scheduler.depth = FixedDepth(depth) if depth else NoDrafts()
        times_ms.append(decode(engine, prompts, tokens + 2 * depth)["step_ms"])
    return times_ms


def with_gains(rows: list[Row]) -> list[Row]:
    """Add the gain of each row over the mean of the plain ones, and the one that step times predict at fixed depths."""
    plain = [row for row in rows if row["case"] == "plain"]
    rate = statistics.mean(row["tokens_per_s"] for row in plain)
    step_ms = statistics.mean(row["step_ms"] for row in plain)
    for row in rows:
        row["gain"] = row["tokens_per_s"] / rate
        if row["case"].startswith("fixed"):
            depth = int(row["case"].split()[1])
            expected = sum(row["p"] ** j for j in range(depth + 1))
            row["predicted_gain"] = expected * step_ms / row["step_ms"]
    return rows


# -------------------------------------------------------------------------------------------- parts


def measure(
    engine: Engine,
    part: str,
    cases: list[tuple[str, DraftDepth, float]],
    batch: int,
    prompts: list[list[int]],
    set_share: Callable[[float], object],
    clock: Clock,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """Run the cases of a batch, plain ones first and last. Yield their rows."""
    rows: list[Row] = []
    for name, depth, p in [("plain", NoDrafts(), 0.0), *cases, ("plain", NoDrafts(), 0.0)]:
        clock.check()
        engine.scheduler.depth = depth
        set_share(p)
        rows.append({"part": part, "batch": batch, "case": name, "p": p, **decode(engine, prompts, tokens)})
        yield with_gains(rows)[-1]


def coin_part(
    part: str, shape: str, batches: tuple[int, ...], clock: Clock, tokens: int = TOKENS, **settings: Any
) -> Iterator[Row]:
    """Yield the times of steps by depth, and the rows of drafters of set acceptance."""
    drafters: list[CoinDrafter] = []

    def make(context: Any) -> Drafter:
        drafters.append(CoinDrafter(context))
        return drafters[-1]

    def set_share(p: float) -> None:
        for drafter in drafters:
            drafter.share.fill_(int(p * 65536))

    with engine_of(shape, Speculation(make, MOST), **settings) as engine:
        for batch in batches:
            prompts = prompts_of(batch)
            set_share(0.0)
            times_ms = warm_up(engine, prompts, range(MOST + 1))
            yield {"part": part, "batch": batch, "case": "step times", "step_ms_by_depth": times_ms}
            depth = AdaptiveDepth(MOST)  # one for all, because it has to learn step times only once
            cases = [("adaptive", depth, p) for p in (0.8, 0.3, 0.0, 0.6, 0.95)]
            fixed = [(f"fixed {k}", FixedDepth(k), p) for k, p in ((5, 0.8), (3, 0.8), (3, 0.3))]
            if batch < 128:
                cases = [*fixed, *cases]
            yield from measure(engine, part, cases, batch, prompts, set_share, clock, tokens)  # type: ignore[arg-type]


def copy_part(shape: str, clock: Clock) -> Iterator[Row]:
    """Yield the rows of prompt lookup while each request edits a file."""
    drafters: list[EditDrafter] = []
    scripts = edits(32, 512, TOKENS, SHAPES[shape]["vocab_size"])
    answers = {str(i): answer for i, (_, answer) in enumerate(scripts)}

    def make(context: Any) -> Drafter:
        drafters.append(EditDrafter(context, answers))
        return drafters[-1]

    speculation = Speculation(make, MOST, lambda model, drafter: ForcedModel(model, drafter.script))  # type: ignore[attr-defined]
    with engine_of(shape, speculation, zero_norm=False, max_num_seqs=32, max_model_len=1024) as engine:
        for batch in (1, 32, 8):
            prompts = [prompt for prompt, _ in scripts[:batch]]
            warm_up(engine, prompts, range(MOST + 1))
            cases: list[tuple[str, DraftDepth, float]] = [
                ("adaptive", AdaptiveDepth(MOST), 0.0), ("fixed 5", FixedDepth(5), 0.0),
            ]  # fmt: skip
            for row in measure(engine, "copy", cases, batch, prompts, lambda p: None, clock):
                row.pop("predicted_gain", None)
                yield row


def eagle3_part(shape: str, clock: Clock, most: int = 3) -> Iterator[Row]:
    """Yield the times of steps with `most` drafts, without a head and with one."""
    times_ms: dict[int, float] = {}
    batches = 1, 8, 32
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(eagle3_head(SHAPES[shape])))
        own = {"spec_method": "eagle3", "spec_model": folder}
        heads = [
            (f"head {form}", None, {**own, "spec_quantization": form}) for form in ("auto", "int8", "fp8")
        ]
        for name, make, settings in (("no head", Speculation(CoinDrafter, most), {}), *heads):
            clock.check()
            with engine_of(shape, make, spec_tokens=most, max_num_seqs=32, **settings) as engine:
                for batch in batches:
                    prompts = prompts_of(batch)
                    warm_up(engine, prompts, range(most, most + 1))
                    engine.scheduler.depth = FixedDepth(most)
                    row = {"part": "eagle3", "case": name, "batch": batch, **decode(engine, prompts, 48)}
                    before = times_ms.setdefault(batch, row["step_ms"])
                    row["drafting_share"] = 1 - before / row["step_ms"]
                    yield row


def demo_part(clock: Clock) -> Iterator[Row]:
    """Yield the rates of the built-in model with its draft model, and plain."""
    draft = {"spec_method": "draft", "spec_model": "demo-draft", "spec_tokens": 4}
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    stories = [f"The story of the {animal}." for animal in ("dog", "cat", "cow", "owl") * 2]
    plain: dict[int, float] = {}
    for name, settings in (
        ("plain", {}),
        ("fixed 4", {**draft, "spec_adaptive": False}),
        ("adaptive", draft),
    ):
        clock.check()
        with LLM("demo", max_model_len=512, **settings) as llm:
            for batch in (1, 8):
                took_s = []
                for _ in range(6):
                    begin = time.perf_counter()
                    outputs = llm.generate(stories[:batch], params, use_tqdm=False)
                    took_s.append(time.perf_counter() - begin)
                totals = llm.client.engine.log.totals
                rate = sum(len(output.outputs[0].token_ids) for output in outputs) / statistics.median(
                    took_s[3:]
                )
                gain = rate / plain.setdefault(batch, rate)
                share = totals.accepted_tokens / max(1, totals.draft_tokens)
                yield {"part": "demo", "batch": batch, "case": name, "gain": gain, "tokens_per_s": rate,
                       "accepted_share": share}  # fmt: skip


def parts(shape: str, clock: Clock) -> dict[str, Callable[[], Iterator[Row]]]:
    """Return the parts by name, the most important first."""
    return {
        "small": lambda: coin_part("small", shape, (1, 8, 32), clock),
        "fp8": lambda: coin_part("fp8", shape, (1,), clock, quantization="fp8", max_num_seqs=8),
        "copy": lambda: copy_part(shape, clock),
        "eagle3": lambda: eagle3_part(shape, clock),
        # Captured at the start, because the batch drains through sizes that no other case has run.
        "large": lambda: coin_part("large", shape, (128, 256, 64), clock, tokens=128, capture_at_start=True),
        "demo": lambda: demo_part(clock),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.1-8B", choices=sorted(SHAPES))
    parser.add_argument("--seconds", type=float, default=100.0, help="start no case after so many seconds")
    parser.add_argument("--parts", default="small,fp8,copy,eagle3,large,demo")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "speculation.json")
    args = parser.parse_args()
    clock, rows = Clock(args.seconds), []
    known = parts(args.shape, clock)
    for name in args.parts.split(","):
        begin = clock.spent_s
        try:
            for row in known[name]():
                rows.append(row)
                shown = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
                print(*shown, flush=True)
                args.out.write_text(json.dumps(rows, indent=1))
        except Deadline:
            print(f"{name}: no time left", flush=True)
        except Exception:
            traceback.print_exc()
        print(f"{name} took {clock.spent_s - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
