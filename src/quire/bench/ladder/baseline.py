"""`transformers` below the first rung, if it is installed: what a user has without an engine.

It is imported for this measurement only. vLLM and llama.cpp want a process of their own: benchmarks/side_by_side.py.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from quire.assembly.device import pick_device, pick_dtype
from quire.bench.ladder.rungs import BATCH, LadderScale
from quire.bench.metrics import percentile
from quire.config import EngineConfig
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec

_ROUNDS = 3  # the first one warms up


@dataclass(frozen=True, slots=True)
class Baseline:
    """The figures of another engine: one request alone, and `BATCH` equal ones in a batch."""

    name: str
    version: str
    prompt_len: int
    answer_len: int
    output_throughput: float  # tokens per second of one request
    ttft_ms: float
    median_itl_ms: float
    p99_itl_ms: float
    batch_throughput: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MissingBaseline:
    """An engine that could not be measured."""

    name: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return the engine for a JSON file."""
        return asdict(self)


def transformers_baseline(config: EngineConfig, scale: LadderScale) -> Baseline | MissingBaseline:
    """Measure the model in `transformers`, with its KV cache, on the device of the ladder."""
    name = "transformers"
    if find_spec(name) is None:
        return MissingBaseline(name, "it is not installed")
    path = locate_model(config.model, config.revision).path
    if not path.is_dir():
        return MissingBaseline(name, f"{path.name} is not a folder of safetensors")
    try:
        return _measure(config, path, scale)
    except Exception as error:  # of another library, about a model that it may not know
        return MissingBaseline(name, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")


def _measure(config: EngineConfig, path: Path, scale: LadderScale) -> Baseline:
    library = import_module("transformers")
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, load_spec(path), device)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    if any(path.glob("*.safetensors")) and config.load_format != "dummy":
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        with torch.device(device):
            model = library.AutoModelForCausalLM.from_config(
                library.AutoConfig.from_pretrained(path), dtype=dtype
            )
    model.to(device).eval()
    prompt_len, answer_len = scale.tokens(48, 256), scale.tokens(48, 48)
    single = [_decode(model, 1, prompt_len, answer_len, scale, seed) for seed in range(_ROUNDS)][1:]
    batch = [_decode(model, BATCH, prompt_len, answer_len, scale, seed) for seed in range(_ROUNDS)][1:]
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    gaps = [1e3 * gap for times in single for gap in times[1:]]
    return Baseline(
        "transformers",
        library.__version__,
        prompt_len,
        answer_len,
        answer_len / statistics.median(map(sum, single)),
        1e3 * statistics.median(times[0] for times in single),
        percentile(gaps, 50),
        percentile(gaps, 99),
        BATCH * answer_len / statistics.median(map(sum, batch)),
    )


@torch.inference_mode()
def _decode(
    model: Any, rows: int, prompt_len: int, answer_len: int, scale: LadderScale, seed: int
) -> list[float]:
    """Decode greedily, and return the seconds of each step, the prompt's first."""
    r = random.Random(seed)
    prompts = [r.choices(range(scale.vocab_size), k=prompt_len) for _ in range(rows)]
    ids, cache, times = torch.tensor(prompts, device=model.device), None, []
    for _ in range(answer_len):
        begin = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids.tolist()  # waits for a GPU
        times.append(time.perf_counter() - begin)
    return times
