"""From import to first token: a checkpoint of a true size on local disk, in fresh processes.

    python benchmarks/startup.py [--model Llama-3.1-8B] [--folder FOLDER] [--out results.json]

Writes safetensors shards of about 5 GB with random bf16 weights to FOLDER (kept and used again if it holds
them; a temporary one otherwise), which leaves them in the page cache. Then starts Python several times,
first with an empty Triton cache, then with what that left on disk. A request has 128 tokens. `process` is the
time since the process was started, `first token` the time since the line `from quire import LLM`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHARD_BYTES = 5_000_000_000
COLUMNS = (
    "spawn",
    "import",
    "config",
    "device",
    "weights",
    "kv_cache",
    "warm_up",
    "request",
    "first token",
    "process",
)


# ------------------------------------------------------------------------------------ the checkpoint


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model asks for."""
    import torch

    from quire.attention.reference import ReferenceAttention
    from quire.layers.env import Env
    from quire.models.registry import build_model
    from quire.models.spec import ModelSpec
    from quire.parallel.parallel import Parallel

    shapes: dict[str, tuple[int, ...]] = {}

    class Names:
        def has(self, name: str) -> bool:
            return True

        def tensor(self, name: str, shape: tuple[int, ...], *cut: slice) -> torch.Tensor:
            shapes[name] = shape
            return torch.empty(shape, device="meta")

        def copy_into(
            self, destination: torch.Tensor, name: str, shape: tuple[int, ...], *cut: slice
        ) -> None:
            shapes[name] = shape

    meta = torch.device("meta")
    build_model(
        ModelSpec.from_config(config), Env(Names(), Parallel(), ReferenceAttention(), meta, torch.bfloat16)
    )
    return shapes


def write_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """Config, index and shards, written side by side; returns the bytes of the weights."""
    import torch

    shards: list[dict[str, tuple[int, ...]]] = [{}]
    sizes = [0]
    for name, shape in tensors_of(config).items():
        size = 2 * torch.Size(shape).numel()
        if sizes[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = shape
        sizes[-1] += size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    noise = (torch.randn(1 << 26, device=device) * 0.02).bfloat16().cpu().view(torch.uint8).numpy().data
    ones = torch.ones(1 << 16, dtype=torch.bfloat16).view(torch.uint8).numpy().data
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]

    def write(file: str, tensors: dict[str, tuple[int, ...]]) -> None:
        header, at = {}, 0
        for name, shape in tensors.items():
            size = 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        rng = random.Random(file)
        with (folder / file).open("wb", buffering=0) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for shape in tensors.values():
                source, left = (ones if len(shape) == 1 else noise), 2 * torch.Size(shape).numel()
                while left:  # the same noise, from another place each time
                    begin = 0 if len(shape) == 1 else 2 * rng.randrange(len(noise) // 4)
                    left -= out.write(source[begin : begin + left])

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(write, names, shards))
    where = {name: file for file, tensors in zip(names, shards) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(sizes)


# ------------------------------------------------------------------------------------------ one start


def child(folder: str) -> None:
    """Runs in a process of its own; prints what it saw as JSON."""
    begin = time.monotonic()
    from quire import LLM, SamplingParams

    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=4096)
    ready = time.monotonic()
    rng = random.Random(1)
    prompt = {"prompt_token_ids": [rng.randrange(1000) for _ in range(128)]}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None
    report = {
        "begin": begin,
        "phases_s": llm.info.phases_s,
        "ready_s": ready - begin,
        "request_s": metrics.first_token_s - metrics.arrival_s,
        "first_token_s": metrics.first_token_s - begin,
        "tokens": output.outputs[0].token_ids,
    }
    print("REPORT " + json.dumps(report), flush=True)
    llm.close()


def start_once(folder: Path, kernels: Path, label: str) -> dict[str, Any]:
    """Start a process; times in seconds."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    spawned = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("REPORT ")), None)
    if line is None:
        raise SystemExit(f"the process failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    report["spawn_s"] = report.pop("begin") - spawned
    report["process_s"] = report["spawn_s"] + report["first_token_s"]
    return {"kernel_cache": label, **report}


def show(run: dict[str, Any]) -> str:
    times = {name: run.get(f"{name.replace(' ', '_')}_s", run["phases_s"].get(name, 0.0)) for name in COLUMNS}
    return f"{run['kernel_cache']:<14}" + "".join(f"{times[name]:>13.2f}" for name in COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--warm", type=int, default=2, help="starts with kernels on disk")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    import torch
    from shapes import SHAPES

    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "model": args.model,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "model"
        if not (folder / "config.json").exists():
            begin = time.perf_counter()
            results["weight_bytes"] = write_checkpoint(folder, SHAPES[args.model])
            results["write_s"] = time.perf_counter() - begin
            print(f"{results['weight_bytes'] / 1e9:.1f} GB written in {results['write_s']:.1f} s", flush=True)
        print(f"{'kernel cache':<14}" + "".join(f"{name:>13}" for name in COLUMNS))
        kernels = Path(temporary) / "kernels"
        for label in ["empty", *["filled"] * args.warm]:
            results["runs"].append(run := start_once(folder, kernels, label))
            print(show(run), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
