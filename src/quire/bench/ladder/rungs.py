"""The rungs of the ladder: the idea, the settings that switch it on, the load that shows it, and where it is built.

Settings accumulate: a rung has those of all rungs below it. Each load is drawn anew for every run, with the same
lengths, so that the prefix cache never holds a prompt of an earlier run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quire
from quire.bench.load.workloads import Workload
from quire.bench.offline import OfferedLoad
from quire.types import EngineInfo

PACKAGE = Path(quire.__file__).parent


@dataclass(frozen=True, slots=True)
class LadderScale:
    """What the machine and the model allow: the context, the vocabulary, and whether real sizes are asked for."""

    model: str
    max_model_len: int
    vocab_size: int
    is_full: bool
    on_gpu: bool
    gpus: int = 0

    def tokens(self, quick: int, full: int) -> int:
        """Return a length: `quick` or `full`, bounded by the context."""
        return max(min(full if self.is_full else quick, self.max_model_len // 2 - 1), 1)

    def count(self, quick: int, full: int) -> int:
        """Return a number of requests: `quick` or `full`."""
        return full if self.is_full else quick


LoadMaker = Callable[[LadderScale, random.Random], OfferedLoad]


@dataclass(frozen=True, slots=True)
class Headline:
    """The figure that a rung is about: its name in a result, its unit, and whether more is better."""

    name: str
    label: str
    more_is_better: bool = True


RATE = Headline("output_throughput", "output tokens/s")
TTFT = Headline("median_ttft_ms", "median time to first token, ms", more_is_better=False)
LATE_ITL = Headline("p99_itl_ms", "99th percentile of inter-token latency, ms", more_is_better=False)


@dataclass(frozen=True, slots=True)
class Rung:
    """One idea."""

    name: str
    idea: str  # what it does, in one sentence
    shown_by: str  # the load, in words
    make_load: LoadMaker
    headline: Headline
    files: tuple[str, ...]  # where it is implemented, relative to the package
    settings: Callable[[LadderScale], dict[str, Any]]
    # Why it cannot be climbed here, or None.
    missing: Callable[[LadderScale, EngineInfo], str | None] = lambda scale, info: None

    def line_counts(self) -> dict[str, int]:
        """Return the number of lines of each file."""
        return {name: len((PACKAGE / name).read_text().splitlines()) for name in self.files}


NAIVE: dict[str, Any] = {
    "kv_layout": "none", "batching": "static", "max_num_seqs": 1, "attention": "reference", "cpu_kernels": False,
    "cpu_replay": False, "cuda_graphs": False, "overlap": False, "shared_prefix": False, "capture_at_start": False,
}  # fmt: skip
BATCH = 8  # rows of the contiguous layout, which reserves a whole context for each


def prompt(scale: LadderScale, r: random.Random, length: int) -> list[int]:
    """Return a random prompt."""
    return r.choices(range(scale.vocab_size), k=length)


def _at_once(work: Workload) -> OfferedLoad:
    return OfferedLoad(work, [0.0] * len(work))


def _few(scale: LadderScale, r: random.Random) -> OfferedLoad:
    return _at_once([(prompt(scale, r, scale.tokens(48, 256)), scale.tokens(48, 48)) for _ in range(2)])


def _one(scale: LadderScale, r: random.Random) -> OfferedLoad:
    return _at_once([(prompt(scale, r, scale.tokens(32, 128)), scale.tokens(192, 192))])


def _many(scale: LadderScale, r: random.Random) -> OfferedLoad:
    length = scale.tokens(64, 256)
    return _at_once([(prompt(scale, r, length), length) for _ in range(scale.count(16, 64))])


def _one_batch(scale: LadderScale, r: random.Random) -> OfferedLoad:
    """Return few requests in a full run: the rung below decodes them one by one, without kernels and graphs."""
    length = scale.tokens(64, 256)
    return _at_once([(prompt(scale, r, length), scale.tokens(64, 48)) for _ in range(scale.count(16, BATCH))])


def _uneven(scale: LadderScale, r: random.Random) -> OfferedLoad:
    """Return requests of which every fourth has a long answer: a static batch waits for it."""
    long, short = scale.tokens(160, 160), scale.tokens(16, 16)
    return _at_once(
        [(prompt(scale, r, scale.tokens(32, 128)), long if i % 4 == 0 else short) for i in range(24)]
    )


def _many_short(scale: LadderScale, r: random.Random) -> OfferedLoad:
    """Return more requests than whole contexts fit into the cache, each much shorter than a context."""
    length = scale.tokens(64, 64)
    return _at_once([(prompt(scale, r, length), length) for _ in range(scale.count(32, 64))])


def long_prompts(scale: LadderScale, r: random.Random) -> OfferedLoad:
    """Return requests that decode, and long prompts that arrive meanwhile."""
    decoding = [(prompt(scale, r, 16), scale.tokens(160, 160)) for _ in range(BATCH - 2)]
    long = [(prompt(scale, r, scale.tokens(1000, 2000)), 4) for _ in range(4)]
    every_s = 0.08 if scale.is_full else 0.05
    return OfferedLoad(
        [*decoding, *long], [0.0] * len(decoding) + [every_s * (i + 1) for i in range(len(long))]
    )


def one_system_prompt(scale: LadderScale, r: random.Random) -> OfferedLoad:
    """Return requests at once that share a long beginning."""
    shared = prompt(scale, r, scale.tokens(768, 1500))
    return _at_once([(shared + prompt(scale, r, 16), 16) for _ in range(scale.count(12, 24))])


def _always(**settings: Any) -> Callable[[LadderScale], dict[str, Any]]:
    return lambda scale: settings


RUNGS: tuple[Rung, ...] = (
    Rung(
        "naive",
        "Compute the whole sequence again for every token.",
        "one request after the other",
        _few,
        RATE,
        ("models/decoder.py", "layers/attention.py", "attention/reference.py"),
        lambda scale: NAIVE,
    ),
    Rung(
        "KV cache",
        "Keep the keys and values of earlier tokens, so that a step computes one token instead of all.",
        "one request after the other",
        _few,
        RATE,
        ("worker/memory/kv_cache.py", "worker/state.py"),
        _always(kv_layout="contiguous", chunked_prefill=False, prefix_caching=False),
    ),
    Rung(
        "static batching",
        "Decode several requests in one step: the weights are read once for all of them.",
        "equal requests at once",
        _one_batch,
        RATE,
        ("core/policy.py", "worker/step/batch.py"),
        _always(max_num_seqs=BATCH),
    ),
    Rung(
        "continuous batching",
        "Admit a waiting request as soon as another one ends, instead of when the whole batch has ended.",
        "requests at once, every fourth with a long answer",
        _uneven,
        RATE,
        ("core/policy.py", "core/scheduler.py", "core/engine.py"),
        _always(batching="continuous"),
    ),
    Rung(
        "paged KV cache",
        "Give out memory in blocks of a few tokens as answers grow, so that more requests fit.",
        "more requests at once than whole contexts fit into the cache",
        _many_short,
        RATE,
        ("core/block_pool.py", "worker/memory/kv_cache.py"),
        lambda scale: {"kv_layout": "paged", "max_num_seqs": 128 if scale.is_full else 32},
    ),
    Rung(
        "chunked prefill",
        "Compute long prompts in chunks beside the rows that decode, so that streams do not stall.",
        "streams, and long prompts that arrive meanwhile",
        long_prompts,
        LATE_ITL,
        ("core/policy.py", "core/plan_builder.py"),
        lambda scale: {"chunked_prefill": True, "mixed_prefill_tokens": 512 if scale.on_gpu else 256},
    ),
    Rung(
        "prefix caching",
        "Reuse the blocks of a prompt's beginning that an earlier request has computed.",
        "requests at once with one long system prompt",
        one_system_prompt,
        TTFT,
        ("core/prefix_cache.py", "core/shared_prefix.py"),
        _always(prefix_caching=True, shared_prefix=True),
    ),
    Rung(
        "fused kernels",
        "Do norm, rotation, attention, gate and residual in kernels written for few rows, not one operation each.",
        "one request",
        _one,
        RATE,
        ("kernels/matmul/gemv.py", "kernels/attention/short.py", "kernels/rope.py", "kernels/cpu/step.c"),
        _always(attention="auto", cpu_kernels=True),
    ),
    Rung(
        "graphs",
        "Capture the launches of a step once, and replay them as one call.",
        "one request",
        _one,
        RATE,
        ("worker/launch/graphs.py", "worker/step/step_shapes.py", "worker/launch/cpu_replay.py"),
        _always(cuda_graphs=True, cpu_replay=True, capture_at_start=True),
    ),
    Rung(
        "overlap",
        "Build the next step on the host while the device runs the present one.",
        "equal requests at once",
        _many,
        RATE,
        ("core/engine.py", "worker/results.py"),
        _always(overlap=True),
    ),
    Rung(
        "quantised weights",
        "Store weights in 8 bits: a step of few rows takes as long as reading them.",
        "one request",
        _one,
        RATE,
        ("quant/forms.py", "quant/loading.py", "quant/formats/convert.py"),
        lambda scale: {"quantization": "fp8" if scale.on_gpu else "int8"},
    ),
    Rung(
        "speculation",
        "Guess several tokens cheaply, and verify them in one step.",
        "one request",
        _one,
        RATE,
        ("speculation/draft_model.py", "speculation/ngram.py", "core/draft_depth.py"),
        lambda scale: (
            {"spec_method": "draft", "spec_model": "demo-draft"}
            if scale.model == "demo"
            else {"spec_method": "ngram"}
        ),
    ),
    Rung(
        "tensor parallelism",
        "Cut every weight over two GPUs, which read their halves at the same time.",
        "one request",
        _one,
        RATE,
        ("ranks/executor.py", "ranks/ring.py", "parallel/communicator.py"),
        lambda scale: {"tensor_parallel_size": 2} if scale.gpus >= 2 else {},
        lambda scale, info: (
            None if scale.gpus >= 2 else f"it needs two GPUs, and this machine has {scale.gpus}"
        ),
    ),
)


def settings_of(rung: int, scale: LadderScale) -> dict[str, Any]:
    """Return the settings of a rung and of all below it."""
    found: dict[str, Any] = {}
    for one in RUNGS[: rung + 1]:
        found |= one.settings(scale)
    return found
