"""The headline figures of small inference engines, measured again with Quire and printed beside theirs.

    python benchmarks/headlines.py [--groups gpt2 clients ...] [--limit-s 100] [--out FILE]

Models have random weights in their true shapes, greedy decoding without an end-of-sequence stop, and token ids in and
out. Rows appear in the order of `GROUPS`, the file is written after each row, and a group that fails or exceeds its
time is reported and left out. Workloads with arrival times keep their order and lengths, but arrive `--pace` times as
fast: at the published pace a data-centre GPU waits for requests most of the time. `--demo` replaces every model by the
built-in one and shortens all lengths, which checks the script on a CPU; the group `toy` is meant for a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shapes import GEMMA3_1B, GPT2, LLAMA32_3B, QWEN3_4B, QWEN25_7B

from quire import EngineConfig
from quire.assembly.device import pick_device
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.load.arrivals import arrival_times
from quire.bench.load.workloads import MAX_RANDOM_ID, PACED, PACES, Workload, scaled, shifted, uniform
from quire.bench.machine import measure
from quire.bench.metrics import serving
from quire.bench.report import save
from quire.bench.run import Run

GREEDY = {"temperature": 0.0}
GROUP_S = 60  # most seconds of a group
BATCH_OF_8 = "batch 8, 128 in, 48 out"
GAINS = (
    "longest gap of streams: whole to chunked",
    "TTFT: without to with prefix cache",
    "time per token at batch 1: eager to graph",
)
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2 124M": GPT2, "Qwen2.5-7B": QWEN25_7B, "Llama-3.2-3B": LLAMA32_3B, "Qwen3-4B": QWEN3_4B,
    "Gemma-3-1B": GEMMA3_1B,
}  # fmt: skip
# Published figures, on the hardware named.
A100, RTX4090, RTX5080, LAPTOP = "A100 80G", "RTX 4090", "RTX 5080", "laptop CPU"
PACED_THERE = {
    "continuous_batching": 317,
    "paged_attention": 455,
    "chunked_prefill": 219,
    "prefix_caching": 331,
}


class TimeUp(Exception):
    """A group or the whole script has used its time."""


class Results:
    """The rows, written to disk after each."""

    def __init__(self, path: Path, machine: Machine, demo: bool, pace: float) -> None:
        self.path, self.machine, self.demo, self.pace = path, machine, demo, pace
        self.shifts = iter(range(1, 10_000))
        self.rows: list[dict[str, Any]] = []
        print(f"{'model':<14}{'case':<43}{'Quire':>12} {'unit':<11}{'published':>10}  on", flush=True)

    def put(
        self, model: str, case: str, value: float, unit: str = "tok/s", there: float | None = None,
        where: str = "", **more: Any,
    ) -> None:  # fmt: skip
        row = {
            "model": model,
            "case": case,
            "value": value,
            "unit": unit,
            "published": there,
            "on": where,
            **more,
        }
        self.rows.append(row)
        save(
            self.path,
            {
                "machine": self.machine.device,
                "torch": torch.__version__,
                "demo": self.demo,
                "rows": self.rows,
            },
        )
        shown = "-" if there is None else f"{there:,.4g}"
        print(f"{model:<14}{case:<43}{value:>12,.2f} {unit:<11}{shown:>10}  {where}", flush=True)

    def length(self, tokens: int) -> int:
        return max(tokens // 16, 2) if self.demo else tokens

    def load(self, bench: Bench, count: int, tokens_in: int, tokens_out: int) -> Workload:
        """Return equal requests that are new to the prefix cache."""
        vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
        return uniform(vocab, count, self.length(tokens_in), self.length(tokens_out), seed=next(self.shifts))

    @contextlib.contextmanager
    def engine(self, model: str, **settings: Any) -> Iterator[Bench]:
        """Start an engine with random weights, warm it up, and free its memory in the end."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
            where = {"model": "demo"} if self.demo else {"model": folder, "load_format": "dummy"}
            length = 512 if self.demo else settings.pop("max_model_len", 4096)
            settings = {
                "max_model_len": length,
                **{k: v for k, v in settings.items() if k != "max_model_len"},
            }
            began = time.monotonic()
            bench = Bench(EngineConfig(skip_tokenizer_init=True, **where, **settings), self.machine)
            print(f"  {model}: engine ready after {time.monotonic() - began:.1f} s", flush=True)
        try:
            bench.run(self.load(bench, 2, 64, 32), GREEDY)
            yield bench
        finally:
            bench.close()
            del bench
            free_memory()


def free_memory() -> None:
    gc.unfreeze()  # an engine freezes its objects
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rate(run: Run) -> float:
    return serving(run)["output_throughput"]


def best_rate(
    results: Results, bench: Bench, count: int, shape: tuple[int, int], open_requests: int | None = None
) -> float:
    """Return the better output rate of two runs; the first may compile kernels and capture graphs."""
    runs = [
        bench.run(results.load(bench, count, *shape), GREEDY, max_concurrency=open_requests) for _ in range(2)
    ]
    return max(map(rate, runs))


def gpt2(results: Results) -> None:
    """GPT-2 in float32: a batch sweep, and the rate of 64 users against one at a time."""
    there = {1: 173, 512: 18_346}
    with results.engine("GPT-2 124M", dtype="float32", max_model_len=1024, max_num_seqs=512) as bench:
        rates = {}
        for batch in (1, 8, 64, 256, 512):
            rates[batch] = best_rate(results, bench, batch, (32, 96))
            results.put(
                "GPT-2 124M", f"batch {batch}, 32 in, 96 out", rates[batch], "tok/s", there.get(batch), A100
            )
        results.put("GPT-2 124M", "batch 512 over batch 1", rates[512] / rates[1], "x", 118, A100)
        users = {n: best_rate(results, bench, min(64, 16 * n), (32, 96), n) for n in (1, 64)}
        results.put(
            "GPT-2 124M", "64 users over one at a time", users[64] / users[1], "x", 11.1, A100, rates=users
        )


def clients(results: Results) -> None:
    """Qwen2.5-7B: clients that each wait for their answer, then the gains of chunks, prefix cache and graphs."""
    there = {1: 55.7, 8: 219.1}
    with results.engine("Qwen2.5-7B", mixed_prefill_tokens=512) as bench:
        for count in (1, 2, 4, 8):
            value = best_rate(results, bench, 2 * count, (128, 128), count)
            case = f"{count} clients, 128 in, 128 out"
            results.put("Qwen2.5-7B", case, value, "tok/s", there.get(count), RTX4090)
        results.put("Qwen2.5-7B", BATCH_OF_8, best_rate(results, bench, 8, (128, 48)))
        after = [spikes(results, bench), prefix_ttft(results, bench), one_step(results, bench)]
    with results.engine("Qwen2.5-7B", chunked_prefill=False, prefix_caching=False) as bench:
        before = [spikes(results, bench), prefix_ttft(results, bench)]
    for case, there_change, old, new in zip(GAINS, (-62.0, -22.0), before, after):
        put_change(results, case, there_change, old, new)
    with results.engine("Qwen2.5-7B", cuda_graphs=False) as bench:
        put_change(results, GAINS[2], -28.9, one_step(results, bench), after[2])


def put_change(results: Results, case: str, there: float, before_ms: float, after_ms: float) -> None:
    change = 100 * (after_ms / before_ms - 1)
    results.put("Qwen2.5-7B", case, change, "%", there, RTX4090, before_ms=before_ms, after_ms=after_ms)


def spikes(results: Results, bench: Bench) -> float:
    """Return the median over streams of their longest gap in ms, while four long prompts arrive.

    The second of two runs counts: the first one captures the shapes of its steps, which takes longer than any of them.
    """
    return [_longest_gap_ms(results, bench) for _ in range(2)][-1]


def _longest_gap_ms(results: Results, bench: Bench) -> float:
    streams, long = results.load(bench, 8, 64, 256), results.load(bench, 4, 3500, 4)
    arrivals = [0.0] * 8 + [0.2 + 0.2 * i for i in range(4)]
    run = bench.run([*streams, *long], GREEDY, arrivals)
    return 1e3 * statistics.median(max(one.itls_s) for one in run.served[:8])


def prefix_ttft(results: Results, bench: Bench) -> float:
    """Return the median time to first token in ms of requests that share 1,024 tokens."""
    work = scaled(
        PACED["prefix_caching"](min(bench.info.vocab_size, MAX_RANDOM_ID), 16), 1 / 16 if results.demo else 1
    )
    work = shifted(
        [(ids, 8) for ids, _ in work], min(bench.info.vocab_size, MAX_RANDOM_ID), next(results.shifts)
    )
    run = bench.run(work, GREEDY, [0.05 * i for i in range(len(work))])
    return 1e3 * statistics.median(one.ttft_s for one in run.served)


def one_step(results: Results, bench: Bench) -> float:
    run = bench.run(results.load(bench, 1, 128, 96), GREEDY)
    return 1e3 * run.served[0].tpot_s


def transformers(results: Results) -> None:
    """Qwen2.5-7B in eager `transformers`, one batch of 8 (the row `batch 8` of Quire beside it)."""
    import side_by_side

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-7B"]))
        if results.demo:
            folder = Path(side_by_side.quire.__file__).parent / "demo" / "base"
        dtype = "float32" if results.demo else "bfloat16"
        engine = side_by_side.Transformers(folder, dtype, torch.get_num_threads(), pick_device("auto").type)
    tokens = results.length(48)
    engine.run(8, results.length(128), 4)
    first, rest = engine.run(8, results.length(128), tokens)
    engine.close()
    free_memory()
    value = 8 * tokens / (first + rest)
    quire = next((r["value"] for r in results.rows if r["case"] == BATCH_OF_8), None)
    results.put("Qwen2.5-7B", f"transformers, {BATCH_OF_8}", value, quire=quire)
    if quire:
        results.put("Qwen2.5-7B", "Quire over transformers at batch 8", quire / value, "x", 1.0, RTX4090)


def paced(model: str) -> Callable[[Results], None]:
    """Return the five paced workloads on a model."""

    def run(results: Results) -> None:
        with results.engine(model) as bench:
            vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
            for name, make in PACED.items():
                pace = PACES[name]
                work = scaled(make(vocab, 4 if results.demo else None), 1 / 16 if results.demo else 1)
                work = shifted(work, vocab, next(results.shifts))
                times = arrival_times(len(work), pace.rate * results.pace, pace.burstiness, 42)
                done = bench.run(work, GREEDY, times, pace.max_concurrency)
                figures = serving(done)
                kept = {
                    key: figures[key]
                    for key in ("duration", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
                }
                there = PACED_THERE.get(name) if model == "Llama-3.2-3B" else None
                results.put(model, name, figures["output_throughput"], "tok/s", there, RTX5080 if there else "",
                            pace=results.pace, **kept)  # fmt: skip

    return run


def real_pace(results: Results) -> None:
    """Llama-3.2-3B with chunked prefill at the published pace, where latencies compare, not rates."""
    with results.engine("Llama-3.2-3B", mixed_prefill_tokens=512) as bench:
        vocab = min(bench.info.vocab_size, MAX_RANDOM_ID)
        work = scaled(
            PACED["chunked_prefill"](vocab, 4 if results.demo else None), 1 / 16 if results.demo else 1
        )
        done = bench.run(work, GREEDY, arrival_times(len(work), PACES["chunked_prefill"].rate, 1.0, 42))
    figures = serving(done)
    results.put(
        "Llama-3.2-3B",
        "chunked_prefill at 6/s: output rate",
        figures["output_throughput"],
        "tok/s",
        219,
        RTX5080,
    )
    results.put("Llama-3.2-3B", "chunked_prefill at 6/s: median ITL", figures["median_itl_ms"], "ms", 90, RTX5080,
                p99_itl_ms=figures["p99_itl_ms"], p99_ttft_ms=figures["p99_ttft_ms"])  # fmt: skip


def toy(results: Results) -> None:
    """The built-in model: 64 requests, 16 open at once."""
    bench = Bench(EngineConfig(model="demo", skip_tokenizer_init=True), results.machine)
    with bench:
        bench.run(uniform(bench.info.vocab_size, 16, 32, 32, seed=1), GREEDY)
        runs = [
            bench.run(uniform(bench.info.vocab_size, 64, 32, 32, seed=2 + i), GREEDY, max_concurrency=16)
            for i in range(3)
        ]
    run = min(runs, key=lambda one: one.duration_s)
    results.put("built-in", "64 requests, 16 open, 32 in, 32 out", rate(run), "tok/s", 2375, LAPTOP)
    rows = statistics.fmean(len(step.rows) for step in run.steps if step.rows)
    results.put("built-in", "rows in a step, mean", rows, "rows", 7.3, LAPTOP)


GROUPS: dict[str, Callable[[Results], None]] = {
    "gpt2": gpt2,
    "clients": clients,
    "paced-llama": paced("Llama-3.2-3B"),
    "transformers": transformers,
    "paced-qwen": paced("Qwen3-4B"),
    "paced-gemma": paced("Gemma-3-1B"),
    "real-pace": real_pace,
    "toy": toy,
}


def ring(signum: int, frame: object) -> None:
    raise TimeUp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--groups", nargs="+", choices=list(GROUPS), default=[name for name in GROUPS if name != "toy"]
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="stop after this many seconds")
    parser.add_argument(
        "--pace", type=float, default=8.0, help="factor on the arrival rates of the paced workloads"
    )
    parser.add_argument(
        "--demo", action="store_true", help="check the script: the built-in model, short lengths"
    )
    parser.add_argument("--out", type=Path, default=Path("headlines.json"))
    args = parser.parse_args()
    began, failed = time.monotonic(), []
    device = pick_device("auto")
    if device.type == "cpu" and not args.demo and set(args.groups) != {"toy"}:
        raise SystemExit("headlines.py needs a GPU for these models: give --demo or --groups toy")
    machine = (
        Machine(platform.processor() or "CPU", 1e10, 1e11)
        if device.type == "cpu"
        else measure(device, torch.bfloat16)
    )
    results = Results(args.out, machine, args.demo, args.pace)
    signal.signal(signal.SIGALRM, ring)
    for name in args.groups:
        left = int(args.limit_s - (time.monotonic() - began))
        if left < 5:
            print(f"{name}: left out, no time is left", flush=True)
            continue
        signal.alarm(min(left, GROUP_S))
        try:
            GROUPS[name](results)
        except Exception as error:  # one model must not lose the rows of the others
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        finally:
            signal.alarm(0)
            free_memory()
        print(f"  {name}: {time.monotonic() - began:.0f} s since the start", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
