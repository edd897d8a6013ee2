"""Ranks on two or more GPUs of one host: sums between ranks, tokens against one rank, throughput of each layout.

    python benchmarks/ranks.py [--ranks 2] [--parts sums tokens kill single nano prefill layouts experts replicas]
                               [--disaggregate] [--seconds 110] [--out FILE]

`sums` times each way to add tensors of 8 KiB to 16 MiB over the ranks, twenty of them in one CUDA graph, and checks the
result; for the rows of decode steps also each way to sum, add the residual and norm. `tokens` compares greedy tokens of the demo model in float32 on one rank and on several. `kill` kills and stops a
rank while it generates, and reports the error and what is left. The other parts run an
8B model with random weights in bfloat16 on one GPU and on several; each figure is the better of two runs. `layouts` runs
them with stages, and with stages of two ranks on four GPUs. `experts` runs the 30B-A3B shape with tensor and with expert
parallelism. `replicas` runs replicas.py. `--disaggregate` runs disaggregation.py: 64 streams of the 8B model decode while
long prompts arrive, and blocks are copied from one GPU to the next. Its engines with a prefill process are refused on
GPUs so far, which the results say. Parts that begin after --seconds are skipped, and a part that fails is reported and does not stop the others. Results are printed
as they come and written as JSON.
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
import traceback
from pathlib import Path
from typing import Any

from shapes import QWEN3_06B, SHAPES

PARTS = ("sums", "tokens", "kill", "single", "nano", "prefill", "layouts", "experts", "replicas")
SIZES = [8 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20]
BEGAN_S = time.monotonic()
QWEN3_30B_A3B: dict[str, Any] = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip


def sums_of_rank(rank: int, ranks: int, port: int, out: str) -> None:
    """Run the part `sums` in the process of one rank."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=device)
    group = dist.group.WORLD
    assert group is not None

    import torch.distributed._symmetric_memory as symm_mem

    from quire.kernels import collective, two_trip
    from quire.parallel.communicator import GroupCommunicator
    from quire.parallel.sum_limits import SumLimits
    from quire.parallel.symmetric import SymmetricCommunicator

    nccl = GroupCommunicator(group)
    ours = SymmetricCommunicator(group, device, nccl)
    second = SymmetricCommunicator(group, device, nccl, SumLimits(one_trip=0, two_trips=1 << 30))
    large = symm_mem.empty(SIZES[-1], dtype=torch.uint8, device=device)
    symm_mem.rendezvous(large, group.group_name)

    def one_trip(x: torch.Tensor) -> torch.Tensor:
        assert collective.takes(x)
        return collective.all_reduce(x, ours._addresses, ours._calls, rank, ranks)

    def two_trips(x: torch.Tensor) -> torch.Tensor:
        assert two_trip.takes(x, ranks)
        return second.all_reduce(x)

    def torch_one_shot(x: torch.Tensor) -> torch.Tensor:
        shared = large[: x.nbytes].view(x.dtype)
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)

    def torch_two_shot(x: torch.Tensor) -> torch.Tensor:
        shared = large[: x.nbytes].view(x.dtype)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)
        return x.copy_(shared)

    ways = {"nccl": nccl.all_reduce, "one trip (Quire)": one_trip, "one shot (torch)": torch_one_shot}
    ways |= {"two shot (torch)": torch_two_shot, "two trips (Quire)": two_trips}
    rows = []
    for size in SIZES:
        for name, way in ways.items():
            x = torch.full((size // 2,), rank + 1.0, dtype=torch.bfloat16, device=device)
            row = {"bytes": size, "way": name, **timed(way, x, ranks * (ranks + 1) / 2)}
            rows.append(row)
            if rank == 0:
                print(row, flush=True)
    rows += norms_of_rank(rank, ranks, one_trip, device)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


def timed(way: Any, x: Any, wanted: float) -> dict[str, Any]:
    """Return microseconds of a call of `way` in a graph of twenty, and whether all of its result is `wanted`."""
    import torch
    import torch.distributed as dist

    try:
        for _ in range(2):
            y = way(x.clone())
        torch.cuda.synchronize()
        correct = bool(((y - wanted).abs() <= 0.01 * abs(wanted)).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for _ in range(20):
                z = way(x)
        z.numel()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / 20)
        return {"us": round(sorted(times)[10], 2), "correct": correct}
    except Exception as error:
        return {"error": str(error).split("\n")[0]}


def norms_of_rank(rank: int, ranks: int, one_trip: Any, device: Any) -> list[dict[str, Any]]:
    """Time sum, residual and norm of the rows of decode steps, in one kernel and in two."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    from quire.kernels import sum_and_norm
    from quire.kernels.norm import add_rms_norm

    group = dist.group.WORLD
    assert group is not None
    words = symm_mem.empty(sum_and_norm.buffer_bytes(ranks) // 8, dtype=torch.int64, device=device)
    words.zero_()
    handle = symm_mem.rendezvous(words, group.group_name)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    calls = torch.zeros(sum_and_norm.MAX_ROWS, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    dist.barrier()  # no rank writes to another's buffer before it is zero
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    rows = []
    for count in (1, 4, 16, 64):
        x = torch.full((count, 4096), rank + 1.0, dtype=torch.bfloat16, device=device)
        old = torch.ones_like(x)
        ways = {
            "one trip, then norm": lambda x, old=old: add_rms_norm(one_trip(x), old, weight, 0.0)[0],
            "sum and norm": lambda x, old=old: sum_and_norm.all_reduce_add_norm(
                x, old, weight, 0.0, addresses, calls, rank, ranks
            )[0],
        }
        for name, way in ways.items():
            rows.append({"bytes": x.nbytes, "way": name, **timed(way, x, 1.0)})
            if rank == 0:
                print(rows[-1], flush=True)
    return rows


def sums(ranks: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out, port = f"{folder}/sums.json", str(random.randrange(20_000, 30_000))
        command = [sys.executable, __file__, "--rank-of-sums"]
        started = [subprocess.Popen([*command, str(rank), str(ranks), port, out]) for rank in range(ranks)]
        try:
            for process in started:
                process.wait(60)
        finally:
            for process in started:
                process.kill()
        return json.loads(Path(out).read_text())


def tokens(ranks: int) -> Any:
    from quire import LLM, SamplingParams

    params = [
        SamplingParams(max_tokens=64, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(16)
    ]
    prompts = [list(range(300 + i, 340 + 9 * i)) for i in range(16)]
    found = []
    for size in (1, ranks):
        llm = LLM("demo", dtype="float32", tensor_parallel_size=size, max_model_len=512, engine_process=True)
        found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        found[-1] += [o.outputs[0].token_ids for o in llm.generate(prompts[:3], params[:3], use_tqdm=False)]
        print(size, "ranks:", llm.info.device, llm.info.start_up(), flush=True)
        llm.client.close()
    return {"equal": found[0] == found[1], "same": sum(a == b for a, b in zip(*found)), "of": len(found[0])}


def kill(ranks: int) -> Any:
    import signal
    import threading

    import psutil

    from quire import LLM, SamplingParams

    found = {}
    for sign in (signal.SIGKILL, signal.SIGSTOP):
        llm = LLM("demo", dtype="float32", tensor_parallel_size=ranks, rank_timeout=5.0)
        children = psutil.Process().children(recursive=True)
        peer = next(p for p in children if "quire.rank_process" in p.cmdline())
        threading.Timer(1.0, peer.send_signal, (sign,)).start()
        begin = time.monotonic()
        try:
            llm.generate(
                [[300 + i] * 20 for i in range(64)],
                SamplingParams(max_tokens=1900, ignore_eos=True, detokenize=False),
                use_tqdm=False,
            )
            text = "no error: it ended before the signal"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - begin, 2)
        llm.client.close()
        left = psutil.wait_procs(children, timeout=10)[1]
        found[sign.name] = {"error": text, "after_s": seconds, "processes_left": len(left)}
    return found


class Throughput:
    """The engines of a model, on one GPU and on several, one after the other."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(shape))

    def run(self, settings: dict[str, Any], names: list[str], seconds: float) -> dict[str, Any]:
        from quire import LLM, SamplingParams
        from quire.bench.load.workloads import WORKLOADS, shifted

        began = time.perf_counter()
        llm = LLM(
            str(self.folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            engine_process=True,
            **settings,
        )
        found: dict[str, Any] = {
            "start_s": round(time.perf_counter() - began, 1),
            "phases_s": llm.info.phases_s,
            "ranks_s": llm.info.rank_phases_s,
        }
        print(settings, found, flush=True)
        try:
            for name in names:
                best, work = 0.0, WORKLOADS[name](100_000, None)
                for turn in range(2):
                    if time.monotonic() - BEGAN_S > seconds:
                        break
                    load = shifted(work, 100_000, turn + 1)
                    prompts = [list(prompt) for prompt, _ in load]
                    params = [
                        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
                        for _, n in load
                    ]
                    begin = time.perf_counter()
                    llm.generate(prompts, params, use_tqdm=False)
                    duration = time.perf_counter() - begin
                    count = sum(n for _, n in load)
                    count += sum(map(len, prompts)) if name == "prefill" else 0
                    best = max(best, count / duration)
                found[name] = round(best, 1)
                print(settings, name, found[name], "tok/s", flush=True)
        finally:
            llm.client.close()
        return found


def layouts_of(parts: list[str], ranks: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the shape and the settings of each engine to run, by what it is called in the results."""
    tensor, dense = {"tensor_parallel_size": ranks}, "Llama-3.1-8B"
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    if {"single", "nano", "prefill"} & set(parts):
        found |= {f"8B on {ranks}": (dense, tensor), "8B on 1": (dense, {"tensor_parallel_size": 1})}
    if "layouts" in parts:
        found[f"8B, {ranks} stages"] = dense, {"pipeline_parallel_size": ranks}
        if ranks >= 4:
            pair = {"pipeline_parallel_size": ranks // 2, "tensor_parallel_size": 2}
            found[f"8B, {ranks // 2} stages of 2"] = dense, pair
    if "experts" in parts:
        spread = tensor | {"enable_expert_parallel": True}
        found |= {f"30B-A3B, TP {ranks}": ("moe", tensor), f"30B-A3B, EP {ranks}": ("moe", spread)}
    return found


def replicas(ranks: int) -> Any:
    """Run replicas.py, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "replicas.json")
        command = [sys.executable, str(Path(__file__).with_name("replicas.py")), "--parts", "chat"]
        subprocess.run([*command, "--replicas", str(ranks), "--out", str(out)], check=True)
        return json.loads(out.read_text())


def disaggregation() -> Any:
    """Run disaggregation.py, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "disaggregation.json")
        command = [sys.executable, str(Path(__file__).with_name("disaggregation.py"))]
        model = ["--shape", "Llama-3.1-8B", "--device", "cuda", "--dtype", "bfloat16"]
        load = ["--streams", "64", "--tokens", "1000", "--prompt-len", "8000", "--prompts", "10"]
        subprocess.run([*command, *model, *load, "--json", str(out)], check=True)
        return json.loads(out.read_text())


def main() -> None:
    if sys.argv[1:2] == ["--rank-of-sums"]:
        rank, ranks, port, out = sys.argv[2:]
        sums_of_rank(int(rank), int(ranks), int(port), out)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--disaggregate", action="store_true", help="also run disaggregation.py")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--out", type=Path, default=Path("ranks.json"))
    args = parser.parse_args()
    results: dict[str, Any] = {"ranks": args.ranks}

    def attempt(name: str, work: Any) -> None:
        if time.monotonic() - BEGAN_S > args.seconds:
            results[name] = "skipped: out of time"
        else:
            try:
                results[name] = work()
            except Exception as error:
                traceback.print_exc()
                results[name] = f"failed: {type(error).__name__}: {error}"
        print(name, results[name], f"at {time.monotonic() - BEGAN_S:.0f} s", flush=True)
        args.out.write_text(json.dumps(results, indent=1))

    if "sums" in args.parts:
        attempt("sums", lambda: sums(args.ranks))
    if "tokens" in args.parts:
        attempt("tokens", lambda: tokens(args.ranks))
    if "kill" in args.parts:
        attempt("kill", lambda: kill(args.ranks))
    names = [part for part in args.parts if part in ("single", "nano", "prefill")] or ["single", "prefill"]
    for name, (shape, settings) in layouts_of(args.parts, args.ranks).items():
        config = QWEN3_30B_A3B if shape == "moe" else SHAPES[shape]
        with tempfile.TemporaryDirectory() as folder:
            throughput = Throughput(Path(folder), config)
            attempt(name, lambda run=throughput.run, its=settings: run(its, names, args.seconds))
    if "replicas" in args.parts:
        attempt("replicas", lambda: replicas(args.ranks))
    if args.disaggregate:
        attempt("disaggregation", disaggregation)


if __name__ == "__main__":
    main()
