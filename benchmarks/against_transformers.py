"""Decode speed of Quire and of `transformers`, in turn, in one run: the demo model and a large shape.

    python benchmarks/against_transformers.py [--shape Qwen3-0.6B] [--dtype bfloat16] [--batch 1 8]

Both sides get the same prompts (token ids) and dtype, choose their threads by default, and decode greedily
without stopping. Ratios are what counts on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import quire
from quire import LLM, SamplingParams

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 151645,
    "dtype": "bfloat16",
}  # fmt: skip
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 128001, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
THREADS = torch.get_num_threads()  # what transformers runs with: torch's default
SHAPES = {"Qwen3-0.6B": QWEN3_06B, "Llama-3.1-8B": LLAMA31_8B}


def prompts(batch: int, length: int) -> list[list[int]]:
    return [[(7919 * i + 31 * j) % 1900 + 50 for j in range(length)] for i in range(batch)]


class Reference:
    """The model in transformers; random weights when `folder` holds none."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if any(folder.glob("*.safetensors")):
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        else:
            with torch.device("cpu"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        self.model.eval().generation_config.eos_token_id = None

    def decode_rate(self, batch: int, length: int, tokens: int) -> float:
        torch.set_num_threads(THREADS)
        ids = torch.tensor(prompts(batch, length))
        with torch.inference_mode():
            cache, times = None, []
            for _ in range(tokens):
                begin = time.perf_counter()
                out = self.model(ids, past_key_values=cache, use_cache=True)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                times.append(time.perf_counter() - begin)
        return batch * (tokens - 1) / sum(times[1:])


class Ours:
    def __init__(self, folder: Path, dtype: str, dummy: bool) -> None:
        self.llm = LLM(
            str(folder), dtype=dtype, load_format="dummy" if dummy else "auto", skip_tokenizer_init=True,
            device="cpu", max_model_len=1024, prefix_caching=False,
        )  # fmt: skip

    def decode_rate(self, batch: int, length: int, tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts(batch, length), params, use_tqdm=False)
        first = max(output.metrics.first_token_s for output in outputs)
        last = max(output.metrics.finished_s for output in outputs)
        return batch * (tokens - 1) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=["demo", *SHAPES], nargs="+", default=["demo", "Qwen3-0.6B"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"{torch.get_num_threads()} threads, {args.length} tokens in, {args.tokens} out, best of {args.rounds}"
    )
    print(f"{'model':<14}{'dtype':<10}{'batch':>5}{'quire tok/s':>13}{'transformers':>14}{'ratio':>7}")
    for shape in args.shape:
        for dtype in args.dtype:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if shape == "demo":
                    folder = Path(quire.__file__).parent / "demo" / "base"
                else:
                    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
                ours = Ours(folder, dtype, shape != "demo")
                theirs = Reference(folder, getattr(torch, dtype))
            for batch in args.batch:
                rates = [
                    (
                        ours.decode_rate(batch, args.length, args.tokens),
                        theirs.decode_rate(batch, args.length, args.tokens),
                    )
                    for _ in range(args.rounds)
                ]
                a, b = max(r[0] for r in rates), max(r[1] for r in rates)
                print(f"{shape:<14}{dtype:<10}{batch:>5}{a:>13.1f}{b:>14.1f}{a / b:>7.2f}", flush=True)
            ours.llm.close()
            del ours, theirs


if __name__ == "__main__":
    main()
