"""The comparisons of `quire bench compare`: what one setting gains, on the load that shows it.

Each variant runs in turns with the first one, so that whatever else the machine does meets both. Two engines are alive
at a time, with KV caches of equal size.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.ladder.rungs import LadderScale, long_prompts, one_system_prompt, prompt
from quire.bench.load.workloads import Workload
from quire.bench.metrics import latencies_ms, percentile
from quire.bench.offline import OfferedLoad
from quire.bench.run import Run
from quire.config import EngineConfig
from quire.types import ConfigError

_GREEDY = {"temperature": 0.0}
_WHOLE_CONTEXTS = 8  # requests of which the contiguous layout keeps a whole context each


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """One load of a comparison, and the figure that is read from its run."""

    label: str
    unit: str
    more_is_better: bool
    make: Callable[[random.Random], OfferedLoad]
    figure: Callable[[Run], float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants of an engine by name, the first of which is the base, and the loads that they run."""

    name: str
    question: str
    variants: dict[str, dict[str, Any]]
    loads: Sequence[ComparedLoad]
    # Tokens of a context, of which the KV cache then holds `_WHOLE_CONTEXTS`; None: what the loads need.
    context: int | None = None


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """The figures of a variant and of the base on one load: medians over the pairs of runs."""

    variant: str
    load: str
    unit: str
    base: float
    value: float
    gain: float  # factor by which the figure improved; the median of the pairs
    gains: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return asdict(self)


def measure_comparison(
    comparison: Comparison, config: EngineConfig, machine: Machine, token_bytes: int, repeats: int
) -> Iterator[ComparedFigure]:
    """Run each variant in turns with the base, and yield its figures load by load.

    Args:
        comparison: the variants and loads.
        config: settings that the variants share.
        machine: its limits, which no figure uses.
        token_bytes: bytes of a token in the KV cache.
        repeats: pairs of runs per load.
    """
    config = _sized(comparison, config, token_bytes)
    (_, base_settings), *others = comparison.variants.items()
    with Bench(replace(config, **base_settings), machine) as base:
        for name, settings in others:
            with Bench(replace(config, **settings), machine) as variant:
                for load in comparison.loads:
                    yield _pairs(name, load, base, variant, repeats)


def _pairs(name: str, load: ComparedLoad, base: Bench, variant: Bench, repeats: int) -> ComparedFigure:
    found: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(-1, repeats):  # the first pair compiles kernels and captures graphs
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        for which in order:
            offered = load.make(random.Random(f"{load.label} {repeat}"))
            run = (base, variant)[which].run(
                offered.work, _GREEDY, offered.arrivals_s, offered.max_concurrency
            )
            if repeat >= 0:
                found[which].append(load.figure(run))
    gains = [
        after / before if load.more_is_better else before / after for before, after in zip(found[0], found[1])
    ]
    middle = statistics.median
    return ComparedFigure(
        name, load.label, load.unit, middle(found[0]), middle(found[1]), middle(gains), gains
    )


def _sized(comparison: Comparison, config: EngineConfig, token_bytes: int) -> EngineConfig:
    """Return the settings with a context and a KV cache in which every load fits."""
    works = [load.make(random.Random(0)).work for load in comparison.loads]
    longest = max(len(ids) + count for work in works for ids, count in work)
    length = config.max_model_len or max(longest, comparison.context or 0)
    if length < longest:
        raise ConfigError(f"{comparison.name} needs max_model_len {longest}, got {length}")
    most = max(sum(len(ids) + count + 64 for ids, count in work) for work in works)
    tokens = _WHOLE_CONTEXTS * length if comparison.context else most * 3 // 2
    memory = config.kv_cache_memory or max(tokens, 2 * length) * token_bytes
    return replace(config, max_model_len=length, kv_cache_memory=memory)


# ------------------------------------------------------------------------------------ the comparisons


def _equal(scale: LadderScale, r: random.Random, count: int, tokens_in: int, tokens_out: int) -> Workload:
    return [(prompt(scale, r, tokens_in), tokens_out) for _ in range(count)]


def _at_once(work: Workload) -> OfferedLoad:
    return OfferedLoad(work, [0.0] * len(work))


def _rate(run: Run) -> float:
    return sum(one.output_len for one in run.completed) / run.duration_s


def _ttft_ms(run: Run) -> float:
    return percentile(latencies_ms(run)["ttft"], 50)


def _itl_ms(run: Run) -> float:
    return percentile(latencies_ms(run)["itl"], 50)


def _longest_gap_ms(run: Run) -> float:
    """Return the median over streams of their longest gap."""
    return 1e3 * statistics.median(max(one.itls_s) for one in run.completed if one.output_len > 16)


def chunked_prefill(scale: LadderScale) -> Comparison:
    chunk = 512 if scale.on_gpu else 256
    load = ComparedLoad(
        "longest gap of a stream", "ms", False, lambda r: long_prompts(scale, r), _longest_gap_ms
    )
    return Comparison(
        "chunked-prefill",
        "how long do streams stall while long prompts arrive?",
        {
            "whole prompts": {"chunked_prefill": False},
            "chunked prefill": {"chunked_prefill": True, "mixed_prefill_tokens": chunk},
        },
        [load],
    )


def prefix_caching(scale: LadderScale) -> Comparison:
    load = ComparedLoad("time to first token", "ms", False, lambda r: one_system_prompt(scale, r), _ttft_ms)
    return Comparison(
        "prefix-caching",
        "how soon does an answer begin, if prompts share their beginning?",
        {"no prefix cache": {"prefix_caching": False}, "prefix cache": {"prefix_caching": True}},
        [load],
    )


def graphs(scale: LadderScale) -> Comparison:
    tokens_in, tokens_out = scale.tokens(32, 128), scale.tokens(64, 128)

    def load(rows: int) -> ComparedLoad:
        make = lambda r: _at_once(_equal(scale, r, rows, tokens_in, tokens_out))  # noqa: E731
        return ComparedLoad(f"batch {rows}", "ms per token", False, make, _itl_ms)

    return Comparison(
        "graphs",
        "what does the replay of captured steps save?",
        {
            "eager": {"cuda_graphs": False, "cpu_replay": False},
            "graphs": {"cuda_graphs": True, "cpu_replay": True},
        },
        [load(rows) for rows in ((1, 8, 32) if scale.on_gpu else (1, 4, 8))],
    )


def split_decoding(scale: LadderScale) -> Comparison:
    if not scale.on_gpu:
        raise ConfigError(
            "split-decoding needs a GPU: the C kernel divides rows and heads over the cores, never a row"
        )
    lengths = sorted({scale.tokens(n, 4 * n) for n in (256, 1024, 4096)})

    def load(length: int) -> ComparedLoad:
        make = lambda r: _at_once(_equal(scale, r, 1, length, 64))  # noqa: E731
        return ComparedLoad(f"context {length}", "ms per token", False, make, _itl_ms)

    return Comparison(
        "split-decoding",
        "what does it gain that several programs share the context of a row?",
        {"unsplit": {"decode_splits": 1}, "split": {}},
        [load(length) for length in lengths],
    )


def users(scale: LadderScale) -> Comparison:
    tokens_in, tokens_out = scale.tokens(48, 128), scale.tokens(48, 128)

    def load(count: int) -> ComparedLoad:
        make = lambda r: OfferedLoad(  # noqa: E731
            _equal(scale, r, max(count, 2), tokens_in, tokens_out), [0.0] * max(count, 2), count
        )
        return ComparedLoad(f"{count} users", "tok/s", True, make, _rate)

    counts = (1, 2, 4, 8, 16, 32, 64, 128) if scale.is_full else (1, 4, 16, 64)
    # The contiguous layout reserves 16 times the tokens of a request.
    return Comparison(
        "users",
        "how many users share the same KV memory?",
        {
            "contiguous": {"kv_layout": "contiguous", "max_num_seqs": _WHOLE_CONTEXTS},
            "paged": {"kv_layout": "paged", "max_num_seqs": 128},
        },
        [load(count) for count in counts],
        context=min(16 * (tokens_in + tokens_out), scale.max_model_len),
    )


def parts(scale: LadderScale) -> Comparison:
    """Compare back ends by part: on a GPU prefill by decode attention, on a CPU attention by layers."""
    length = scale.tokens(512, 4096)

    def prompts(r: random.Random) -> OfferedLoad:
        return _at_once(_equal(scale, r, 2, length, 1))

    def decoding(r: random.Random) -> OfferedLoad:
        return _at_once(_equal(scale, r, 8, length // 2, 32))

    plain: dict[str, Any] = {"cuda_graphs": False, "cpu_replay": False, "prefix_caching": False}
    basic: dict[str, Any] = {"norm_backend": "reference", "mlp_backend": "reference"}
    if scale.on_gpu:
        names = ("reference", "triton")
        variants: dict[str, dict[str, Any]] = {
            f"{p} prefill, {d} decode": {**plain, "prefill_attention": p, "decode_attention": d}
            for p in names
            for d in names
        }
        variants |= {
            "FlashAttention prefill, triton decode": {**plain, "prefill_attention": "library", "decode_attention": "triton"},
            "triton, norms and MLPs basic": {**plain, **basic},
            "triton, norms and MLPs by libraries": {**plain, "norm_backend": "library", "mlp_backend": "library"},
        }  # fmt: skip
    else:
        variants = {
            "reference": {**plain, **basic, "decode_attention": "reference"},
            "C attention": {**plain, **basic},
            "C norms and MLPs": {**plain, "decode_attention": "reference"},
            "C for all": plain,
        }
    variants["all, with graphs"] = {"prefix_caching": False}
    return Comparison(
        "parts",
        "which part gains how much?",
        variants,
        [
            ComparedLoad("prefill", "ms to first token", False, prompts, _ttft_ms),
            ComparedLoad("decode", "ms per token", False, decoding, _itl_ms),
        ],
    )


def latent_prefill(scale: LadderScale) -> Comparison:
    lengths = sorted({scale.tokens(n, 8 * n) for n in (128, 1024, 4096)})

    def load(length: int) -> ComparedLoad:
        make = lambda r: _at_once(_equal(scale, r, 1, length, 1))  # noqa: E731
        return ComparedLoad(f"prompt of {length}", "ms to first token", False, make, _ttft_ms)

    return Comparison(
        "latent-prefill",
        "how soon does an answer begin, if prompts attend to keys and values expanded from latents?",
        {way: {"prefill_attention": way, "prefix_caching": False} for way in ("absorbed", "expanded")},
        [load(length) for length in lengths],
    )


COMPARISONS: dict[str, Callable[[LadderScale], Comparison]] = {
    "parts": parts,
    "chunked-prefill": chunked_prefill,
    "prefix-caching": prefix_caching,
    "graphs": graphs,
    "split-decoding": split_decoding,
    "users": users,
    "latent-prefill": latent_prefill,
}
