"""Output of results: text in the format of vLLM's benchmarks, and JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.bench.growth import GrowthPoint
from quire.bench.kv_use import KVUse
from quire.bench.metrics import METRICS
from quire.bench.run import Run
from quire.types import ConfigError

_WIDTH = 50


def print_serving(found: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print the block of `vllm bench serve`."""
    _heading(" Serving Benchmark Result ", "=")
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", found["completed"]),
        ("Failed requests:", found["failed"]),
        ("Maximum request concurrency:", found["max_concurrency"]),
        ("Request rate configured (RPS):", None if found["request_rate"] == "inf" else found["request_rate"]),
        ("Benchmark duration (s):", found["duration"]),
        ("Total input tokens:", found["total_input_tokens"]),
        ("Total generated tokens:", found["total_output_tokens"]),
        ("Request throughput (req/s):", found["request_throughput"]),
        ("Request goodput (req/s):", found["request_goodput"]),
        ("Output token throughput (tok/s):", found["output_throughput"]),
        ("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", found["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", found["total_token_throughput"]),
    ]
    _rows(rows)
    for name in metrics:
        if found[f"mean_{name}_ms"] is None:
            continue
        _heading(METRICS[name], "-")
        label = name.upper()
        _rows(
            [
                (f"Mean {label} (ms):", found[f"mean_{name}_ms"]),
                (f"Median {label} (ms):", found[f"median_{name}_ms"]),
            ]
        )
        _rows([(f"P{p:g} {label} (ms):", found[f"p{p:g}_{name}_ms"]) for p in percentiles])
    print_drafts(found)
    if "share_of_limit" in found:  # known only for an engine in this process
        print_limits(found)
    print("=" * _WIDTH)


def print_drafts(found: dict[str, Any]) -> None:
    """Print the figures of speculative decoding, if there are any."""
    if "spec_decode_num_drafts" not in found:
        return
    _heading("Speculative Decoding", "-")
    rates = found["spec_decode_per_position_acceptance_rates"]
    _rows(
        [
            ("Acceptance rate (%):", found["spec_decode_acceptance_rate"]),
            ("Acceptance length:", found["spec_decode_acceptance_length"]),
            ("Drafts:", found["spec_decode_num_drafts"]),
            ("Draft tokens:", found["spec_decode_draft_tokens"]),
            ("Accepted tokens:", found["spec_decode_accepted_tokens"]),
            *((f"Acceptance at position {n} (%):", rate) for n, rate in enumerate(rates)),
        ]
    )


def print_limits(found: dict[str, Any]) -> None:
    """Print the share of the machine's measured limit."""
    machine = found["machine"]
    _heading("Share of the Machine's Limit", "-")
    _rows(
        [
            ("Bandwidth measured (GB/s):", machine["bytes_per_s"] / 1e9),
            ("Matrix rate measured (TFLOP/s):", machine["flops_per_s"] / 1e12),
            ("Least time of these steps (s):", found["floor_s"]),
            ("Share of limit (%):", 100 * found["share_of_limit"]),
            ("Bandwidth used, MBU (%):", 100 * found["mbu"]),
            ("Matrix rate used, MFU (%):", 100 * found["mfu"]),
        ]
    )


def print_throughput(found: dict[str, Any]) -> None:
    """Print the lines of `vllm bench throughput`."""
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_throughput']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {found['total_input_tokens']}")
    print(f"Total num output tokens:  {found['total_output_tokens']}")
    print(f"Prompt tokens from the prefix cache:  {found['cached_tokens']}")
    print_drafts(found)


def print_latency(found: dict[str, Any]) -> None:
    """Print the lines of `vllm bench latency`."""
    print(f"Avg latency: {found['avg_latency']} seconds")
    for p, seconds in found["percentiles"].items():
        print(f"{p}% percentile latency: {seconds} seconds")
    print_drafts(found)
    print_limits(found)


def print_batch(found: dict[str, Any], first: bool) -> None:
    """Print the line of one batch size and length, after the heading if it is the first."""
    if first:
        print(
            f"{'in':>6}{'out':>6}{'batch':>6}{'latency s':>11}{'out tok/s':>11}{'TTFT ms':>9}{'ITL ms':>9}{'P99 ITL':>9}{'of limit':>10}"
        )
    itl, late = found["median_itl_ms"] or 0.0, found["p99_itl_ms"] or 0.0
    print(
        f"{found['input_len']:>6}{found['output_len']:>6}{found['batch_size']:>6}{found['avg_latency']:>11.4f}{found['output_throughput']:>11.1f}"
        f"{found['median_ttft_ms']:>9.2f}{itl:>9.3f}{late:>9.3f}{100 * found['share_of_limit']:>9.1f}%",
        flush=True,
    )


def print_workload(found: dict[str, Any], first: bool) -> None:
    """Print the line of one of several workloads, after the heading if it is the first."""
    if first:
        print(
            f"{'workload':<21}{'requests':>9}{'seconds':>9}{'req/s':>8}{'out tok/s':>11}{'TTFT ms':>10}{'P99':>10}"
            f"{'ITL ms':>9}{'P99':>9}{'cached':>9}"
        )
    itl, late = found["median_itl_ms"] or 0.0, found["p99_itl_ms"] or 0.0
    print(
        f"{found['workload']:<21}{found['completed']:>9}{found['duration']:>9.2f}{found['request_throughput']:>8.2f}"
        f"{found['output_throughput']:>11.1f}{found['median_ttft_ms']:>10.2f}{found['p99_ttft_ms']:>10.2f}"
        f"{itl:>9.2f}{late:>9.2f}{found['cached_tokens']:>9}",
        flush=True,
    )


def print_users(found: dict[str, Any], first: bool) -> None:
    """Print the line of one number of users, after the heading if it is the first."""
    if first:
        print(
            f"{'users':>6}{'req/s':>9}{'out tok/s':>11}{'TTFT ms':>9}{'P99':>9}{'TPOT ms':>9}{'P99':>9}"
            f"{'ITL ms':>9}{'P99':>9}{'failed':>8}"
        )
    shown = "".join(
        f"{found[f'{figure}_{name}_ms'] or 0.0:>9.2f}"
        for name in ("ttft", "tpot", "itl")
        for figure in ("median", "p99")
    )
    print(
        f"{found['max_concurrency']:>6}{found['request_throughput']:>9.2f}{found['output_throughput']:>11.1f}"
        f"{shown}{found['failed']:>8}",
        flush=True,
    )


def print_growth_point(point: GrowthPoint, first: bool) -> None:
    """Print the line of one point of `quire bench growth`, after the heading if it is the first."""
    if first:
        print(
            f"{'curve':<9}{'batch':>6}{'context':>9}{'ms':>11}{'limit ms':>11}{'of limit':>10}  {'bound by':<13}"
            f"{'host us':>8}{'MHz':>6}{'W':>6}"
        )
    clock, power = point.conditions["clock_mhz"], point.conditions["power_w"]
    print(
        f"{point.curve:<9}{point.batch_size:>6}{point.context:>9}{point.time_s * 1e3:>11.3f}"
        f"{point.floor_s * 1e3:>11.3f}{100 * point.share_of_limit:>9.1f}%  {point.bound_by:<13}"
        f"{point.host_s * 1e6:>8.0f}{'-' if clock is None else f'{clock:.0f}':>6}{'-' if power is None else f'{power:.0f}':>6}",
        flush=True,
    )


def print_kv_use(use: KVUse, first: bool) -> None:
    """Print the line of one batch size of `quire bench memory`, after the heading if it is the first."""
    if first:
        print(
            f"{'layout':<12}{'sent':>6}{'held':>6}{'reserved MiB':>14}{'used MiB':>10}{'wasted':>9}{'of pool':>9}"
            f"{'tok/s':>10}"
        )
    wasted, share = use.wasted_bytes / use.reserved_bytes, use.reserved_bytes / use.pool_bytes
    print(
        f"{use.layout:<12}{use.batch_size:>6}{use.held:>6}{use.reserved_bytes / 2**20:>14.2f}"
        f"{use.used_bytes / 2**20:>10.2f}{100 * wasted:>8.0f}%{100 * share:>8.0f}%{use.output_throughput:>10.0f}",
        flush=True,
    )


def print_medians(shares: dict[str, float]) -> None:
    """Print the median share of the limit of each curve."""
    print("Median share of the limit: " + ", ".join(f"{name} {100 * s:.0f} %" for name, s in shares.items()))


def details(run: Run) -> dict[str, list[Any]]:
    """Return the figures of each request by the names of `vllm bench serve --save-detailed`, times in seconds."""
    found: dict[str, list[Any]] = {
        "input_lens": [one.prompt_len for one in run.served],
        "output_lens": [one.output_len for one in run.served],
        "start_times": [one.start_s for one in run.served],
        "ttfts": [one.ttft_s if one.token_times_s else None for one in run.served],
        "itls": [one.itls_s for one in run.served],
        "errors": [one.error or "" for one in run.served],
    }
    if any(one.text is not None for one in run.served):
        found["generated_texts"] = [one.text or "" for one in run.served]
    return found


def result_name(found: dict[str, Any], kind: str, stamped: bool = True) -> str:
    """Return a file name for a result, made of its label, request rate, model and, if `stamped`, time."""
    model = str(found["model_id"]).rstrip("/").split("/")[-1]
    rate = f"-{found['request_rate']}qps" if "request_rate" in found else ""
    time = f"-{datetime.now():%Y%m%d-%H%M%S}" if stamped else ""
    return f"{found.get('label') or kind}{rate}-{model}{time}.json"


def save(path: Path, found: dict[str, Any], append: bool = False) -> None:
    """Write a result as JSON, and create its folder if necessary.

    Args:
        path: the file.
        found: the result.
        append: whether to append it as one line (JSON lines) instead of replacing the file.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=None if append else 1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _heading(text: str, line: str) -> None:
    print(f"{text:{line}^{_WIDTH}}")


def _rows(rows: Sequence[tuple[str, Any]]) -> None:
    """Print labels and values, without those that are None."""
    for label, value in rows:
        if value is not None:
            print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
