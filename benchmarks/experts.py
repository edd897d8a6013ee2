"""Time the kernels of a mixture-of-experts layer, and a model with such layers end to end.

    python benchmarks/experts.py                          # every tile of every kernel, one GPU
    python benchmarks/experts.py --tokens 1 16 --skip-model
    python benchmarks/experts.py --skip-kernels --layers 24

Kernels run in CUDA graphs over several sets of weights, so that no weight is in the cache. The shape is that of
Qwen3-30B-A3B: 128 experts of 2048 x 768, 8 per token. The rate in GB/s counts the weights of the chosen experts.
`before` is the path without these kernels: sorting in PyTorch around its grouped product. The model has random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire import EngineConfig
from quire.bench.cost import Machine
from quire.bench.drive import Bench
from quire.bench.load.workloads import WORKLOADS, shifted
from quire.kernels.activation import gated as gated_kernel
from quire.kernels.ahead import background_compilation
from quire.kernels.experts.few import few_down, few_gate_up
from quire.kernels.experts.group import GroupedRows, group
from quire.kernels.experts.many import GroupedTile, many_down, many_gate_up, weighted_sum
from quire.kernels.experts.route import FEW_TOKENS, rule_arguments
from quire.kernels.experts.router import norm_and_route, route_all
from quire.kernels.norm import add_rms_norm
from quire.kernels.target import target_of
from quire.layers import moe, routing
from quire.layers.expert_weights import ExpertWeights
from quire.layers.fused_experts import FusedExperts
from quire.layers.mlp import gated
from quire.layers.moe import GroupedMLPs, SortedExperts, library_product
from quire.layers.routing import choose_experts, fuses_experts
from quire.layers.routing_params import Routing

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
SETS = 6
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": HIDDEN,
    "intermediate_size": 6144, "moe_intermediate_size": WIDTH, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
FEW_TILES = {
    "gate_up": [
        (64, 128, 4, 3), (64, 128, 2, 3), (64, 128, 4, 4), (64, 64, 4, 5), (64, 256, 4, 2), (64, 256, 8, 2),
        (128, 64, 4, 4), (128, 64, 8, 4), (32, 256, 2, 3), (32, 128, 2, 5), (32, 64, 2, 6), (16, 256, 1, 4),
        (16, 256, 2, 4), (16, 512, 2, 3),
    ],
    "down": [
        (64, 256, 8, 3), (64, 256, 8, 2), (64, 256, 4, 2), (64, 128, 4, 5), (64, 128, 4, 4), (64, 64, 4, 6),
        (128, 128, 8, 3), (128, 64, 4, 5), (32, 256, 2, 3), (32, 256, 4, 2), (32, 128, 2, 5),
    ],
}  # fmt: skip
_MIDDLE = {
    "gate_up": [(32, 64, 128, 4, 4), (32, 64, 64, 4, 5), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 4),
                (64, 128, 64, 8, 4), (64, 64, 64, 8, 4)],
    "down": [(32, 128, 64, 4, 5), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 128, 128, 8, 3), (64, 256, 64, 8, 3)],
}  # fmt: skip
MANY_TILES = {
    64: {
        "gate_up": [(16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 32, 256, 4, 3), (16, 128, 64, 4, 5), (16, 64, 256, 4, 2)],
        "down": [(16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 128, 64, 4, 5), (16, 128, 128, 4, 3)],
    },
    256: {
        "gate_up": [(32, 64, 128, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 5), (32, 128, 64, 4, 4), (32, 128, 64, 8, 4)],
        "down": [(32, 128, 64, 4, 5), (32, 128, 64, 4, 4), (32, 256, 64, 8, 4), (32, 64, 128, 4, 4)],
    },
    512: _MIDDLE,
    1024: _MIDDLE,
    2048: {
        "gate_up": [(64, 128, 64, 8, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
                    (128, 64, 64, 4, 4)],
        "down": [(64, 128, 64, 4, 4), (64, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 3)],
    },
    8192: {
        "gate_up": [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 5), (128, 64, 64, 4, 4), (256, 64, 64, 8, 3)],
        "down": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3)],
    },
}  # fmt: skip

Call = Callable[[int], Any]


def attempt(call: Call, index: int) -> bool:
    with contextlib.suppress(Exception):
        call(index)
        return True
    return False


def timed_us(call: Call, least_s: float = 0.02) -> float:
    """Return microseconds per call, in a graph of a call for each set of weights, repeated for `least_s`."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for i in range(SETS):
                call(i)
    best, spent = float("inf"), 0.0
    while spent < least_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (2 * SETS))
        spent += start.elapsed_time(end) / 1e3
    return best


class KernelTimes:
    """The measurements for one number of tokens."""

    def __init__(self, tokens: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.tokens, self.gate_up, self.down = tokens, gate_up, down  # [sets, experts, ...]
        make = torch.Generator(device="cuda").manual_seed(tokens)
        self.x = torch.randn(tokens, HIDDEN, device="cuda", generator=make).bfloat16()
        self.residual = torch.randn(tokens, HIDDEN, device="cuda", generator=make).bfloat16()
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.router = (torch.randn(EXPERTS, HIDDEN, device="cuda", generator=make) / 45).bfloat16()
        self.rule = rule_arguments(EXPERTS, TOP_K, renormalise=True)
        self.arrived = torch.zeros(1024, device="cuda", dtype=torch.int32)
        logits = self.x.float() @ self.router.float().t()
        self.ids, self.weights = choose_experts(
            logits, Routing(num_experts=EXPERTS, top_k=TOP_K, renormalise=True)
        )
        self.met = len(self.ids.unique())

    def route(self, _: int = 0) -> Any:
        return route_all(self.x, self.router, None, None, self.rule, self.arrived[-1:])

    def variants(self) -> Iterator[tuple[str, Call, float, float]]:
        """Yield name, call, bytes of weights and operations of each variant."""
        tokens, x = self.tokens, self.x
        expert, flops = 2 * HIDDEN * WIDTH, 2 * tokens * TOP_K * HIDDEN * WIDTH
        yield "add, norm", lambda i: add_rms_norm(x, self.residual, self.norm, 1e-6), 0, 0
        yield "route", self.route, 0, 0
        choice = self.route()
        if tokens <= FEW_TOKENS:
            a = (self.residual, self.norm, 1e-6, self.router, None, None, self.rule, self.arrived[-1:])
            yield "add, norm, route", lambda i: norm_and_route(x, *a), 0, 0
            h = few_gate_up(x, self.gate_up[0], None, choice, "silu")
            for tile in FEW_TILES["gate_up"]:
                yield (
                    f"gate_up {tile}",
                    lambda i, t=tile: few_gate_up(x, self.gate_up[i], None, choice, "silu", t),
                    2 * self.met * expert,
                    2 * flops,
                )
            for tile in FEW_TILES["down"]:
                for early in (False, True):
                    yield (
                        f"down {tile}{' early' * early}",
                        lambda i, t=tile, e=early: few_down(
                            h, self.down[i], None, choice, self.arrived, t, e
                        ),
                        self.met * expert,
                        flops,
                    )
        else:
            yield from self.many_variants(choice, expert, flops)
        both = 3 * self.met * expert, 3 * flops
        fused = [FusedExperts(ExpertWeights(g, d), "silu") for g, d in zip(self.gate_up, self.down)]
        yield "fused experts", lambda i: fused[i](x, choice), *both
        yield "fused layer: route, experts", lambda i: fused[i](x, self.route()), *both
        act = gated("silu", None)
        sorted_experts = [
            SortedExperts(GroupedMLPs(ExpertWeights(g, d), act, library_product))
            for g, d in zip(self.gate_up, self.down)
        ]
        rule = Routing(num_experts=EXPERTS, top_k=TOP_K, renormalise=True)

        def before(i: int) -> Any:
            logits = F.linear(x, self.router).float()
            return sorted_experts[i](x, moe.ExpertChoice(*choose_experts(logits, rule)))

        yield "before: route, experts", before, *both

    def many_variants(self, choice: Any, expert: int, flops: int) -> Iterator[tuple[str, Call, float, float]]:
        x = self.x
        for rows in sorted({tile[0] for tile in self.tiles("gate_up")}):
            yield f"group {rows}", lambda i, r=rows: group(choice, EXPERTS, r), 0, 0
        by_rows = (False, True) if self.tokens >= 256 else (False,)
        for name in ("gate_up", "down"):
            for sizes in self.tiles(name):
                grouped = group(choice, EXPERTS, sizes[0])
                h = torch.zeros(self.tokens * TOP_K, WIDTH, device="cuda", dtype=torch.bfloat16)
                for order in by_rows:
                    tile = GroupedTile(*sizes, order)
                    call = functools.partial(self.product, name, grouped, h, tile)
                    size = 2 if name == "gate_up" else 1
                    yield f"{name} {sizes}{' by rows' * order}", call, size * self.met * expert, size * flops
        grouped = group(choice, EXPERTS, 64)
        rows = torch.zeros(self.tokens * TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)
        yield "weighted sum", lambda i: weighted_sum(rows, grouped.place, choice.weights), 0, 0
        yield "gather rows", lambda i: x[grouped.source], 0, 0

        def library(i: int) -> Any:
            g = group(choice, EXPERTS, 64)
            h = F.grouped_mm(x[g.source], self.gate_up[i].transpose(1, 2), offs=g.ends)
            out = F.grouped_mm(gated_kernel(h, "silu"), self.down[i].transpose(1, 2), offs=g.ends)
            return weighted_sum(out, g.place, choice.weights)

        yield "library products, fused around", library, 3 * self.met * expert, 3 * flops

    def product(self, name: str, grouped: GroupedRows, h: torch.Tensor, tile: GroupedTile, i: int) -> Any:
        if name == "gate_up":
            return many_gate_up(self.x, self.gate_up[i], None, grouped, "silu", tile)
        return many_down(h, self.down[i], None, grouped, tile)

    def tiles(self, name: str) -> list[tuple[int, ...]]:
        return MANY_TILES[min(MANY_TILES, key=lambda size: abs(size - self.tokens))][name]

    def check(self) -> float:
        """Return the largest error of the fused experts, relative to the largest output."""
        choice = self.route()
        got = FusedExperts(ExpertWeights(self.gate_up[0], self.down[0]), "silu")(self.x, choice).float()
        chosen = torch.zeros(self.tokens, EXPERTS, device="cuda").scatter_(1, choice.ids.long(), 1.0)
        wanted_choice = torch.zeros_like(chosen).scatter_(1, self.ids, 1.0)
        print(
            f"  {self.tokens} tokens: {int((chosen != wanted_choice).any(1).sum())} routed otherwise",
            flush=True,
        )
        sample = torch.arange(0, self.tokens, max(self.tokens // 64, 1), device="cuda")
        total = torch.zeros(len(sample), HIDDEN, device="cuda")
        for j in range(TOP_K):
            for place, token in enumerate(sample.tolist()):
                e = int(choice.ids[token, j])
                gate, up = (self.gate_up[0, e].float() @ self.x[token].float()).chunk(2)
                total[place] += choice.weights[token, j] * (self.down[0, e].float() @ (F.silu(gate) * up))
        again = FusedExperts(ExpertWeights(self.gate_up[0], self.down[0]), "silu")(self.x, self.route())
        assert torch.equal(again.float(), got), "two runs differ"
        return float((got[sample] - total).abs().max() / total.abs().max())


def time_kernels(counts: list[int]) -> list[dict[str, Any]]:
    make = torch.Generator(device="cuda").manual_seed(0)
    block = torch.randn(1 << 24, device="cuda", generator=make).bfloat16() / 40
    gate_up = torch.empty(SETS, EXPERTS, 2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    down = torch.empty(SETS, EXPERTS, HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16)
    for weight in (gate_up, down):
        flat = weight.view(-1)
        for begin in range(0, flat.numel(), block.numel()):
            flat[begin : begin + block.numel()] = block[: flat.numel() - begin]
    del block
    measured = [KernelTimes(tokens, gate_up, down) for tokens in counts]
    begin_s = time.perf_counter()
    with background_compilation(torch.device("cuda", 0)):
        for one in measured:
            for _, call, _, _ in one.variants():
                attempt(call, 0)
    print(f"compiled in {time.perf_counter() - begin_s:.1f} s", flush=True)
    torch.cuda.synchronize()
    rows = []
    for one in measured:
        try:
            print(f"error {one.check():.4f}", flush=True)
        except Exception as error:  # a kernel that fails must not hide the others
            print(f"check of {one.tokens} tokens: {type(error).__name__}: {error}", flush=True)
        for name, call, size, flops in one.variants():
            try:
                us = timed_us(call)
            except Exception as error:
                print(f"{one.tokens:>6} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rows.append(
                {
                    "tokens": one.tokens,
                    "name": name,
                    "us": us,
                    "GB/s": size / us / 1e3,
                    "TFLOP/s": flops / us / 1e6,
                }
            )
            print(f"{one.tokens:>6} {name:<44}{us:>9.1f} us {size / us / 1e3:>7.0f} GB/s {flops / us / 1e6:>6.0f} TFLOP/s",
                  flush=True)  # fmt: skip
    return rows


def run_model(layers: int, workload: str, runs: int, fused: bool) -> dict[str, Any]:
    moe.fuses_experts = routing.fuses_experts = fuses_experts if fused else lambda device, dtype: False
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": layers}))
        config = EngineConfig(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096)
        begin_s = time.perf_counter()
        with Bench(config, Machine(device="", bytes_per_s=1.0, flops_per_s=1.0)) as bench:
            start_s = time.perf_counter() - begin_s
            work = WORKLOADS[workload](100_000, None)
            tokens = sum(count for _, count in work)
            runs_s = [
                bench.run(shifted(work, 100_000, run), {"temperature": 0.0}).duration_s for run in range(runs)
            ]
    row = {"layers": layers, "workload": workload, "fused": fused, "start_s": start_s, "runs_s": runs_s,
           "tokens_per_s": [tokens / s for s in runs_s]}  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 512, 1024, 2048, 8192])
    parser.add_argument("--skip-kernels", action="store_true")
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument(
        "--nano-layers", type=int, help="of the workload nano; default: 24 with less than 120 GB"
    )
    parser.add_argument("--before", action="store_true", help="also run the model without the kernels")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "experts.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"device": str(target_of(torch.device("cuda", 0))), "kernels": [], "models": []}
    if not args.skip_kernels:
        found["kernels"] = time_kernels(args.tokens)
        args.out.write_text(json.dumps(found))
        torch.cuda.empty_cache()
    if not args.skip_model:
        roomy = torch.cuda.get_device_properties(0).total_memory > 120e9
        nano_layers = args.nano_layers or (args.layers if roomy else args.layers // 2)
        plan = [
            (args.layers, "single", 2, True),
            (nano_layers, "nano", 1, True),
            (args.layers, "prefix", 1, True),
        ]
        if args.before:
            plan += [(args.layers, "single", 1, False), (nano_layers, "nano", 1, False)]
        for case in plan:
            try:
                found["models"].append(run_model(*case))
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
            args.out.write_text(json.dumps(found))
            torch.cuda.empty_cache()
    print("written to", args.out)


if __name__ == "__main__":
    main()
