"""Throughput and latency of `LLM.generate`: token ids in, greedy or sampled, no end-of-sequence stop.

Figures and JSON keys are those of `vllm bench throughput` and `vllm bench latency`, so that runs of the two
can be laid side by side.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tqdm import tqdm

from quire.bench.workloads import Work, uniform
from quire.llm import LLM
from quire.types import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def throughput(llm: LLM, work: Work, params: dict[str, Any], use_tqdm: bool) -> dict[str, Any]:
    """Run all of `work` at once. Seconds, requests and tokens per second; latencies in milliseconds."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    each = [SamplingParams(**{**params, "max_tokens": n, "ignore_eos": True}) for _, n in work]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, each, use_tqdm=use_tqdm)
    elapsed = time.perf_counter() - begin
    tokens_in = sum(len(ids) for ids, _ in work)
    tokens_out = sum(len(answer.token_ids) for out in outputs for answer in out.outputs)
    first_ms, each_ms = [], []
    for out in outputs:
        metrics = out.metrics
        assert metrics and metrics.first_token_s is not None and metrics.finished_s is not None
        first_ms.append((metrics.first_token_s - metrics.arrival_s) * 1e3)
        if (more := len(out.outputs[0].token_ids) - 1) > 0:
            each_ms.append((metrics.finished_s - metrics.first_token_s) * 1e3 / more)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(work),
        "total_num_tokens": tokens_in + tokens_out,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "requests_per_second": len(work) / elapsed,
        "tokens_per_second": (tokens_in + tokens_out) / elapsed,
        "output_throughput": tokens_out / elapsed,
        "cached_tokens": sum(out.num_cached_tokens for out in outputs),
        "median_ttft_ms": statistics.median(first_ms),
        "median_tpot_ms": statistics.median(each_ms) if each_ms else None,
    }


def latency(
    llm: LLM,
    batch_size: int,
    input_len: int,
    output_len: int,
    warmup: int,
    iterations: int,
    params: dict[str, Any],
) -> dict[str, Any]:
    """Seconds from a batch's start to its last token, over `iterations` batches of fresh prompts."""
    vocab = llm.info.vocab_size
    chosen = SamplingParams(**{**params, "max_tokens": output_len, "ignore_eos": True})
    seconds = []
    for i in tqdm(range(warmup + iterations), desc="Latency", unit="batch"):
        work = uniform(vocab, batch_size, input_len, output_len, seed=i)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids, _ in work], chosen, use_tqdm=False)
        if i >= warmup:
            seconds.append(time.perf_counter() - begin)
    return {
        "model_id": llm.info.model,
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": {str(p): percentile(seconds, p) for p in PERCENTILES},
    }


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
