"""Flags of vLLM, SGLang and llama.cpp that have another name here, are not needed, or are not available yet."""

from __future__ import annotations

NAMES = {
    "-c": "--max-model-len",
    "-n": "--max-tokens",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "--async-scheduling": "--overlap",
    "--attention-backend": "--attention",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--disable-log-stats": "--log-stats-interval 0",
    "--disable-overlap-schedule": "--no-overlap",
    "--disable-radix-cache": "--no-prefix-caching",
    "--enable-chunked-prefill": "--chunked-prefill",
    "--enable-log-requests": "--log-requests",
    "--enable-per-request-metrics": "--receipts",
    "--enable-prefix-caching": "--prefix-caching",
    "--enable-priority-scheduling": "--scheduling-policy priority",
    "--enforce-eager": "--no-cuda-graphs",
    "--gpu-memory-utilization": "--memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--max-num-queued-reqs": "--max-waiting",
    "--max-num-queued-tokens": "--max-waiting-tokens",
    "--max-queued-requests": "--max-waiting",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--memory-utilization",
    "--model-path": "--model",
    "--n-predict": "--max-tokens",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--page-size": "--block-size",
    "--radix-eviction-policy": "--eviction",
    "--schedule-policy": "--scheduling-policy",
    "--draft-max": "--spec-tokens",
    "--draft-model": "--spec-method draft --spec-model",
    "--model-draft": "--spec-method draft --spec-model",
    "--num-speculative-tokens": "--spec-tokens",
    "--spec-length": "--spec-tokens",
    "--speculative-algorithm": "--spec-method (EAGLE is eagle, EAGLE3 eagle3, NEXTN mtp, STANDALONE draft)",
    "--speculative-decoding": "--spec-method ngram, or --spec-method draft --spec-model MODEL",
    "--speculative-draft-model-path": "--spec-model",
    "--speculative-model": "--spec-model",
    "-md": "--spec-method draft --spec-model",
    "--speculative-num-draft-tokens": "--spec-tokens",
    "--temp": "--temperature",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--tokenizer-path": "--tokenizer",
    "--uvicorn-log-level": "--log-level",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
}
MISSING = {
    "other splits of a model than tensor, pipeline and expert parallelism": (
        "--ep-size", "--split-mode", "--tensor-split", "--distributed-executor-backend",
    ),
    "the formats of bitsandbytes": ("--load-in-4bit", "--load-in-8bit"),
    "LoRA": ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--lora-paths", "--lora"),
    "images and audio": ("--mmproj", "--limit-mm-per-prompt", "--image"),
    "offloading to the host": ("-ngl", "--n-gpu-layers", "--gpu-layers", "--cpu-offload-gb", "--swap-space", "--kv-offloading-size"),
}  # fmt: skip
NEEDLESS = (
    "--enable-auto-tool-choice",
    "--enable-cache-report",
    "--enable-metrics",
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
)


def hint(flag: str) -> str | None:
    """Return what to use instead of another engine's `flag`, or None if the flag is unknown."""
    name = flag.replace("_", "-")
    if name in NAMES:
        return f"here it is {NAMES[name]}"
    for feature, flags in MISSING.items():
        if name in flags:
            return f"not available yet: Quire has no support for {feature}"
    if name == "--trust-remote-code":
        return "Quire never runs code from checkpoints"
    return "leave it out: this is always on here" if name in NEEDLESS else None
