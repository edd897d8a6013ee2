"""Decode and prefill throughput of Quire, `transformers`, llama.cpp and vLLM, side by side in one run.

    python benchmarks/side_by_side.py [--device cuda] [--shape Qwen3-0.6B] [--dtype bfloat16] [--batch 1 8]

All engines get the same prompts (token ids), dtype and number of threads (torch's default), and decode greedily
without stopping. Decode is tokens per second after the first token; prefill is prompt tokens per second up to the first
token. torch is imported first, so its threads wait with torch's default settings instead of Quire's (GOMP_SPINCOUNT,
config.py). Engines take turns in every round, and the best round counts. On a shared machine, compare the ratios.

llama.cpp takes part on a CPU if `llama_cpp` can be imported (`pip install llama-cpp-python` compiles it; Quire does not
depend on it). It reads a GGUF file of the same shape with random weights, which is written for the run. vLLM takes part
on a GPU if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from shapes import SHAPES

import quire
from quire import LLM, SamplingParams

# Otherwise transformers mistakes the kernels.py in this folder for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))

THREADS = torch.get_num_threads()  # Quire changes it from step to step
MAX_LEN = 1024


def prompts(batch: int, length: int) -> list[list[int]]:
    return [[(7919 * i + 31 * j) % 1900 + 50 for j in range(length)] for i in range(batch)]


class Engine(Protocol):
    def run(self, batch: int, length: int, tokens: int) -> tuple[float, float]:
        """Generate `tokens` tokens per prompt. Return the seconds to the first ones, and those for the rest."""
        ...

    def close(self) -> None: ...


class Quire:
    def __init__(self, folder: Path, dtype: str, threads: int, device: str) -> None:
        dummy = not any(folder.glob("*.safetensors"))
        self.llm = LLM(
            str(folder), dtype=dtype, load_format="dummy" if dummy else "auto", skip_tokenizer_init=True,
            device=device, max_model_len=MAX_LEN, prefix_caching=False,
        )  # fmt: skip

    def run(self, batch: int, length: int, tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts(batch, length), params, use_tqdm=False)
        begin = min(output.metrics.arrival_s for output in outputs)
        first = max(output.metrics.first_token_s for output in outputs)
        return first - begin, max(output.metrics.finished_s for output in outputs) - first

    def close(self) -> None:
        self.llm.close()


class Transformers:
    def __init__(self, folder: Path, dtype: str, threads: int, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.threads, self.device = threads, device
        if any(folder.glob("*.safetensors")):
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        else:
            config = AutoConfig.from_pretrained(folder)
            with torch.device(device):  # a CPU would take minutes for random numbers of a large model
                self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.model.to(device).eval()

    @torch.inference_mode()
    def run(self, batch: int, length: int, tokens: int) -> tuple[float, float]:
        torch.set_num_threads(self.threads)
        ids, cache, times = torch.tensor(prompts(batch, length), device=self.device), None, []
        for _ in range(tokens):
            begin = time.perf_counter()
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            ids.tolist()  # waits for a GPU
            times.append(time.perf_counter() - begin)
        return times[0], sum(times[1:])

    def close(self) -> None:
        del self.model


class Vllm:
    def __init__(self, folder: Path, dtype: str, threads: int, device: str) -> None:
        import vllm

        self.params = vllm.SamplingParams
        dummy = not any(folder.glob("*.safetensors"))
        self.llm = vllm.LLM(
            str(folder), dtype=dtype, load_format="dummy" if dummy else "auto", skip_tokenizer_init=True,
            max_model_len=MAX_LEN, enable_prefix_caching=False, gpu_memory_utilization=0.3,
        )  # fmt: skip

    def run(self, batch: int, length: int, tokens: int) -> tuple[float, float]:
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, length)]

        def seconds(count: int) -> float:
            params = self.params(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            self.llm.generate(asked, params, use_tqdm=False)
            return time.perf_counter() - begin

        first = seconds(1)
        return first, max(seconds(tokens) - first, 0.0) if tokens > 1 else 0.0

    def close(self) -> None:
        del self.llm


class LlamaCpp:
    """llama.cpp's decode loop on token ids, through its C interface."""

    def __init__(self, folder: Path, dtype: str, threads: int, device: str) -> None:
        import llama_cpp

        self.lib, self.threads = llama_cpp, threads
        config = json.loads((folder / "config.json").read_text())
        self.vocab = config["vocab_size"]
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "model.gguf"
            write_gguf(path, config, dtype)
            params = llama_cpp.llama_model_default_params()
            params.use_mmap = False
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise SystemExit("llama.cpp could not read the file that was written for it")

    def run(self, batch: int, length: int, tokens: int) -> tuple[float, float]:
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * MAX_LEN, batch
        params.n_batch = batch * length
        params.n_threads = params.n_threads_batch = self.threads
        context = lib.llama_init_from_model(self.model, params)
        feed = lib.llama_batch_init(batch * length, 0, 1)
        rows, times = prompts(batch, length), []
        for step in range(tokens):
            begin = time.perf_counter()
            start = 0 if step == 0 else length + step - 1
            last = self._fill(feed, rows, start)
            if lib.llama_decode(context, feed):
                raise SystemExit("llama.cpp failed to decode")
            rows = [[self._greedy(context, index)] for index in last]
            times.append(time.perf_counter() - begin)
        lib.llama_batch_free(feed)
        lib.llama_free(context)
        return times[0], sum(times[1:])

    def _fill(self, feed: Any, rows: list[list[int]], start: int) -> list[int]:
        """Fill the batch row by row, from position `start` on, and return the indices that need logits."""
        at, last = 0, []
        for row, ids in enumerate(rows):
            for offset, token in enumerate(ids):
                feed.token[at], feed.pos[at] = token, start + offset
                feed.n_seq_id[at], feed.seq_id[at][0] = 1, row
                feed.logits[at] = offset == len(ids) - 1
                at += 1
            last.append(at - 1)
        feed.n_tokens = at
        return last

    def _greedy(self, context: Any, index: int) -> int:
        logits = self.lib.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def close(self) -> None:
        self.lib.llama_model_free(self.model)


def write_gguf(path: Path, config: dict[str, Any], dtype: str) -> None:
    """Write a GGUF file of the config's shape, with random weights and without a tokenizer."""
    import gguf

    hidden, heads, kv_heads = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim, inner = config.get("head_dim", hidden // heads), config["intermediate_size"]
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, cols: int) -> None:
        weight = torch.randn(rows, cols).mul_(0.02)
        if dtype == "float32":
            writer.add_tensor(name, weight.numpy())
        else:
            data = weight.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", config["vocab_size"], hidden)
    vector("output_norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("output.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        vector(prefix + "attn_norm.weight", hidden)
        vector(prefix + "ffn_norm.weight", hidden)
        if config["model_type"] == "qwen3":
            vector(prefix + "attn_q_norm.weight", dim)
            vector(prefix + "attn_k_norm.weight", dim)
        matrix(prefix + "attn_q.weight", heads * dim, hidden)
        matrix(prefix + "attn_k.weight", kv_heads * dim, hidden)
        matrix(prefix + "attn_v.weight", kv_heads * dim, hidden)
        matrix(prefix + "attn_output.weight", hidden, heads * dim)
        matrix(prefix + "ffn_gate.weight", inner, hidden)
        matrix(prefix + "ffn_up.weight", inner, hidden)
        matrix(prefix + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ENGINES: dict[str, Callable[[Path, str, int, str], Engine]] = {
    "quire": Quire,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
}
NEEDS = {"transformers": "transformers", "llama.cpp": "llama_cpp", "vllm": "vllm"}  # modules


def measure(engines: dict[str, Engine], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best rates of all rounds, one row for decode and one for prefill."""
    decode, prefill = (dict.fromkeys(engines, 0.0) for _ in range(2))
    for _ in range(args.rounds):
        for name, engine in engines.items():
            _, after = engine.run(batch, args.length, args.tokens)
            decode[name] = max(decode[name], batch * (args.tokens - 1) / after)
        for name, engine in engines.items():
            first, _ = engine.run(batch, args.prompt, 1)
            prefill[name] = max(prefill[name], batch * args.prompt / first)
    return [
        {"batch": batch, "what": what, **rates} for what, rates in (("decode", decode), ("prefill", prefill))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["demo", *SHAPES], nargs="+", default=["demo", "Qwen3-0.6B"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], nargs="+", default=["bfloat16"])
    parser.add_argument("--engine", choices=list(ENGINES), nargs="+", default=list(ENGINES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128, help="prompt tokens before decoding")
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens of the prefill rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    args = parser.parse_args()
    elsewhere = {"cpu": "vllm", "cuda": "llama.cpp"}[args.device]
    chosen = [name for name in args.engine if name != elsewhere]
    for name in [name for name in chosen if name in NEEDS and find_spec(NEEDS[name]) is None]:
        chosen.remove(name)
        print(f"{name} left out: {NEEDS[name]} cannot be imported")
    print(
        f"{THREADS} threads, load {os.getloadavg()[0]:.1f}; decode: {args.length} tokens in, {args.tokens} out; "
        f"prefill: {args.prompt} tokens in; best of {args.rounds} rounds, tok/s"
    )
    print(
        f"{'model':<12}{'dtype':<10}{'batch':>5}  {'':<8}" + "".join(f"{name:>14}" for name in chosen), end=""
    )
    print("".join(f"{'quire/' + name:>20}" for name in chosen if name != "quire"))
    rows = []
    for shape in args.shape:
        for dtype in args.dtype:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if shape == "demo":
                    folder = Path(quire.__file__).parent / "demo" / "base"
                else:
                    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
                engines = {name: ENGINES[name](folder, dtype, THREADS, args.device) for name in chosen}
            for batch in args.batch:
                for row in measure(engines, batch, args):
                    rows.append({"model": shape, "dtype": dtype, **row})
                    print(line(rows[-1], chosen), flush=True)
            for engine in engines.values():
                engine.close()
    if args.out:
        args.out.write_text(
            json.dumps({"threads": THREADS, "torch": torch.__version__, "rows": rows}, indent=1)
        )


def line(row: dict[str, Any], names: list[str]) -> str:
    rates = "".join(f"{row[name]:>14,.1f}" for name in names)
    ratios = [row["quire"] / row[name] for name in names if name != "quire"] if "quire" in names else []
    head = f"{row['model']:<12}{row['dtype']:<10}{row['batch']:>5}  {row['what']:<8}"
    return head + rates + "".join(f"{ratio:>20.2f}" for ratio in ratios)


if __name__ == "__main__":
    main()
