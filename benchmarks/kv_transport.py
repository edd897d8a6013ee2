"""Copies of KV blocks between two processes on one GPU, and what they add to the time to first token.

    python benchmarks/kv_transport.py [--json FILE] [--part copies] [--part first-tokens]

`copies` moves scattered blocks of 2 MiB, those of an 8B model in bfloat16, from a process that exports them: GB/s by
number of blocks and by programs of the kernel. Beside it is the way through pinned host memory, by the copier of
`--kv-host-memory`: out and in, one after the other, as two processes would.

`first-tokens` sends one prompt at a time to an idle engine: with its own prefill, and with a prefill process. The receipt's
terms tell the prefill there from the transfer that remains after it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from shapes import SHAPES

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.host import build_engine
from quire.types import EngineRequest, SamplingParams, SharedBlocks, TransferOrder
from quire.worker.executor import device_guard
from quire.worker.transfer.block_bytes import BlockBytes
from quire.worker.transfer.cuda_ipc import CudaHandles, IpcExports, IpcReader, SideStream
from quire.worker.transfer.mover import GpuCopier
from quire.worker.transfer.peers import PeerMover, describe_blocks

LAYERS, BLOCK_BYTES, BLOCKS = 32, 32 << 10, 1024  # bytes of a block in each of two tensors of a layer
COUNTS, PROGRAMS = (4, 16, 94, 512), (8, 16, 32, 64, 132)
GPU = torch.device("cuda", 0)


def make_blocks() -> BlockBytes:
    """Return the KV cache of an 8B model, 2 GiB."""
    shape = BLOCKS, BLOCK_BYTES
    return BlockBytes(
        [tuple(torch.zeros(shape, dtype=torch.uint8, device=GPU) for _ in range(2)) for _ in range(LAYERS)]
    )


def describe(blocks: BlockBytes, exports: IpcExports | None = None) -> SharedBlocks:
    """Return the description of `blocks`."""
    return describe_blocks("cuda-ipc", blocks, 16, [(LAYERS, None)], exports)


def export() -> None:
    """Export blocks of ones until the input ends."""
    blocks = make_blocks()
    for part in blocks.parts:
        part.fill_(1)
    torch.cuda.synchronize()
    print(msgspec.msgpack.encode(describe(blocks, IpcExports(CudaHandles(GPU)))).hex(), flush=True)
    sys.stdin.read()


def await_end(mover: PeerMover) -> None:
    """Wait until an order ends."""
    while not mover.ended():
        mover.wait(1.0)


def median_ms(run: Any) -> float:
    """Return the median of nine runs, after two others."""
    times = []
    for _ in range(11):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])


def copies() -> dict[str, Any]:
    """Time copies from another process, and through host memory."""
    from quire.kernels.block_copy import BlockCopy

    blocks, rng = make_blocks(), random.Random(0)
    rows: list[dict[str, Any]] = []
    process = subprocess.Popen(
        [sys.executable, __file__, "--export"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shared = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=SharedBlocks)
    host = GpuCopier(blocks, max(COUNTS), blocks.size, 64, GPU)
    for programs in PROGRAMS:
        reader = IpcReader(
            blocks,
            CudaHandles(GPU),
            partial(BlockCopy, GPU, programs=programs),
            SideStream(GPU),
        )
        mover = PeerMover(describe(blocks), reader, device_guard(GPU))
        mover.add_peer(0, -1, shared)
        for count in COUNTS:
            sources, targets = (rng.sample(range(BLOCKS), count) for _ in range(2))
            order = TransferOrder(1, "pull", sources, targets)

            def pull(mover: PeerMover = mover, order: TransferOrder = order) -> None:
                mover.start([order])
                await_end(mover)

            ms = median_ms(pull)
            right = all(bool((part[order.targets] == 1).all()) for part in blocks.parts)
            rows.append({"way": "cuda-ipc", "programs": programs, "blocks": count, "ms": ms, "right": right})
        mover.close()
    for count in COUNTS:
        sources, targets = (rng.sample(range(BLOCKS), count) for _ in range(2))

        def through_host(sources: list[int] = sources, targets: list[int] = targets) -> None:
            host.begin_save(sources, [*range(len(sources))])()
            host.begin_load([*range(len(sources))], targets)()

        rows.append({"way": "host memory", "blocks": count, "ms": median_ms(through_host)})
    for row in rows:
        row["gb_s"] = row["blocks"] * blocks.size / row["ms"] / 1e6
        print(row, flush=True)
    process.kill()
    process.communicate()
    return {"device": torch.cuda.get_device_name(), "rows": rows}


def first_token(engine: Engine, name: str, prompt: list[int]) -> dict[str, float]:
    """Return the milliseconds to the first token of a prompt, and the terms of its receipt."""
    begin, first = time.perf_counter(), 0.0
    engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    timing = None
    while engine.scheduler.requests:
        for output in engine.step():
            if output.token_ids and not first:
                first = time.perf_counter() - begin
            timing = output.timing or timing
    assert timing is not None
    waited = {term: 1e3 * seconds for term, seconds in timing.waited_s.items()}
    return {"ttft_ms": 1e3 * first, **waited, "fetched": float(timing.fetched_tokens.get("prefill", 0))}


def first_tokens(shape: str, lengths: list[int]) -> dict[str, Any]:
    """Time first tokens of random prompts, with and without a prefill process."""
    found: dict[str, Any] = {"shape": shape}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]))
        base: dict[str, Any] = {
            "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "bfloat16",
            "max_model_len": max(lengths) + 64, "kv_cache_memory": 4 << 30, "max_num_seqs": 64,
        }  # fmt: skip
        modes: dict[str, dict[str, Any]] = {
            "joint": {},
            "prefill:1,decode:1": {"disaggregate": "prefill:1,decode:1"},
        }
        for mode, settings in modes.items():
            engine, _ = build_engine(EngineConfig(**base, **settings))
            rng = random.Random(0)
            for length in lengths:
                runs = [
                    first_token(engine, f"{length}-{i}", [rng.randrange(5, 400) for _ in range(length)])
                    for i in range(8)
                ][2:]
                terms = {name for run in runs for name in run}
                row = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in sorted(terms)}
                found[f"{mode}, {length} tokens"] = row
                print(f"{mode}, {length} tokens: {row}", flush=True)
            engine.close()
    return found


def main() -> None:
    """Run the parts and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=("copies", "first-tokens"), help="default: all")
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=tuple(SHAPES), help="of first-tokens")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--export", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.export:
        export()
        return
    parts = {"copies": copies, "first-tokens": lambda: first_tokens(args.shape, args.lengths)}
    results: dict[str, Any] = {}
    for part in args.part or parts:
        results[part] = parts[part]()
        if args.json:
            args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
