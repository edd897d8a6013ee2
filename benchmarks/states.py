"""Time to first token of a hybrid model whose prompts share a beginning, with snapshots of its states and without.

    python benchmarks/states.py [--shared 512] [--own 48] [--questions 5] [--dtype float32] [--out FILE]

The model has the shape of LFM2-350M and random weights. Two engines in one process answer the same questions in turn,
one with the prefix cache and one without, so that both see the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams

ATTENTION = {2, 5, 8, 10, 12, 14}
SHAPE: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 1024,
    "intermediate_size": 6656, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "conv_L_cache": 3, "norm_eps": 1e-5, "max_position_embeddings": 128000, "rope_theta": 1e6, "dtype": "bfloat16",
    "layer_types": ["full_attention" if i in ATTENTION else "conv" for i in range(16)], "eos_token_id": 7,
}  # fmt: skip


def time_to_first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return the seconds until the first token, all tokens of the answer, and the cached tokens of the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add(EngineRequest(name, prompt, params))
    began, first, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
    while engine.has_work:
        for output in engine.step():
            first = first or time.perf_counter() - began
            tokens += output.token_ids
            cached = output.num_cached_tokens
    return first, tokens, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=int, default=512, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=48, help="further tokens of each prompt")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="in float32 both engines give the same tokens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for cached in (True, False):
            config = EngineConfig(
                model=folder, dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True, prefix_caching=cached, max_num_seqs=4,
                max_model_len=args.shared + args.own + 64, kv_cache_memory=256 << 20,
            )  # fmt: skip
            engines[cached], info = build_engine(config)
    rng = random.Random(0)
    shared = [rng.randrange(100, 60_000) for _ in range(args.shared)]
    rows = []
    for question in range(args.questions):
        prompt = shared + [rng.randrange(100, 60_000) for _ in range(args.own)]
        with_cache, tokens, hit = time_to_first_token(engines[True], str(question), prompt)
        without, expected, _ = time_to_first_token(engines[False], str(question), prompt)
        rows.append(
            {
                "question": question, "cached_tokens": hit, "cached_s": round(with_cache, 4),
                "computed_s": round(without, 4), "same_tokens": tokens == expected,
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    hits = [row["computed_s"] / row["cached_s"] for row in rows if row["cached_tokens"]]
    found = {"state_bytes": info.state_bytes, "block_bytes": info.block_bytes, "rows": rows}
    found["ratio"] = round(statistics.median(hits), 2) if hits else None
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
