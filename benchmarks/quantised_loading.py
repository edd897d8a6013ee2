"""Check and time quantised weights on a GPU: loading in the background, conversion, graphs, against the plain model.

Each format is loaded twice: converted from the plain demo model, and from a copy written by `quire quantize`. The
log-probabilities of a text must stay close to the plain model's. Then a large shape with random weights is converted,
to see that the plain model is never resident.

    python benchmarks/quantised_loading.py --json loading.json
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.cli.main import main as quire

FORMATS = ("fp8", "fp8-block", "int8", "int4")
TEXT = "Once upon a time there was a child called Mira who lived in Southport. Mira's best friend was called Tom."
PROMPTS = ["Once upon a time", "Mira and Tom went to", "What is the colour of"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def scores(model: str, **settings: Any) -> tuple[list[float], list[list[int]], float]:
    """Return the log-probabilities of the text, greedy tokens with graphs, and the seconds of the start-up."""
    begin = time.perf_counter()
    llm = LLM(model, device="cuda", max_model_len=512, max_num_seqs=16, **settings)
    ready_s = time.perf_counter() - begin
    (out,) = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert out.prompt_logprobs is not None
    found = [at[token].logprob for at, token in zip(out.prompt_logprobs, out.prompt_token_ids) if at]
    outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in outs]
    llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return found, tokens, ready_s


def compare(name: str, reference: list[float], model: str, **settings: Any) -> dict[str, float]:
    """Measure one way of loading; print it, or why it failed."""
    try:
        found, tokens, ready_s = scores(model, **settings)
    except Exception:
        traceback.print_exc()
        print(f"{name:<28} FAILED", flush=True)
        return {"failed": 1.0}
    error = sum(abs(a - b) for a, b in zip(found, reference)) / len(reference)
    print(
        f"{name:<28} mean change of a log-probability {error:.4f}, ready in {ready_s:.2f} s {tokens[0][:8]}",
        flush=True,
    )
    return {"change": error, "ready_s": ready_s}


def convert_large(folder: Path, form: str) -> dict[str, float]:
    """Convert random weights of a large model, and return the most memory and the tokens per second of one request."""
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    llm = LLM(
        str(folder), device="cuda", load_format="dummy", quantization=form, skip_tokenizer_init=True,
        kv_cache_memory=1 << 30, max_model_len=2048, max_num_seqs=16,
    )  # fmt: skip
    ready_s = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 1e9
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, detokenize=False)
    for _ in range(2):
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    llm.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    print(
        f"8B shape, {form:<10} peak {peak:.1f} GB, ready in {ready_s:.1f} s, {128 / seconds:.0f} tok/s",
        flush=True,
    )
    return {"peak_gb": peak, "ready_s": ready_s, "tokens_per_s": 128 / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    reference, _, _ = scores("demo")
    with tempfile.TemporaryDirectory() as scratch:
        for form in FORMATS:
            results[f"converted {form}"] = compare(f"converted {form}", reference, "demo", quantization=form)
            out = Path(scratch) / form
            try:
                quire(["quantize", "demo", str(out), "--format", form])
                results[f"copy {form}"] = compare(f"copy {form}", reference, str(out))
            except Exception:
                traceback.print_exc()
        large = Path(scratch) / "large"
        large.mkdir()
        (large / "config.json").write_text(json.dumps(CONFIG))
        for form in ("auto", "int4", "fp8"):
            try:
                results[f"large {form}"] = convert_large(large, form)
            except Exception:
                traceback.print_exc()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
