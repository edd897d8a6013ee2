"""Time the products of quantised experts on one GPU, beside those in bf16.

    python benchmarks/quantised_experts.py [--cases fp8-block,mxfp4,int4] [--tokens 1 8 ...] [--sweep] [--out FILE]

Every call runs in a CUDA graph over several layers of random weights, together larger than the L2 cache. `limit` is the
time to read the stored weights of the chosen experts once, or to multiply, whichever is longer. Choices are random.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from quire.kernels.ahead import background_compilation
from quire.kernels.experts.choice import ExpertChoice
from quire.kernels.experts.few_packed import few_packed_down, few_packed_gate_up
from quire.kernels.experts.group import group
from quire.kernels.experts.many import GroupedTile, weighted_sum
from quire.kernels.experts.many_packed import many_packed_down, many_packed_gate_up, packed_tiles_for
from quire.kernels.experts.route import FEW_TOKENS, route, rule_arguments
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.layers.expert_weights import ExpertWeights
from quire.layers.fused_experts import FusedExperts
from quire.layers.quantised_experts import QuantisedExperts, fused_quantised
from quire.quant.forms import Fp4Weight, Fp8Weight, IntGroupWeight

BANDWIDTH, FLOPS = 4.29e12, 8.18e14
Call = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """A layer's shape and the form of its experts."""

    experts: int
    top_k: int
    hidden: int
    width: int
    kind: str = "silu"
    biased: bool = False


QWEN, GPT_OSS = Case(128, 8, 2048, 768), Case(32, 4, 2880, 2880, "clamped_swiglu", True)
QWEN_NEXT = Case(512, 10, 2048, 512)
CASES = {
    "next-fp8": QWEN_NEXT,
    "next-fp8-block": QWEN_NEXT,
    "fp8-block": QWEN,
    "fp8": QWEN,
    "int4": QWEN,
    "bf16": QWEN,
    "mxfp4": GPT_OSS,
    "gpt-oss-bf16": GPT_OSS,
}
FEW_TILES = [  # outputs, bytes, warps, stages, splits
    (16, 128, 8, 3, 8), (16, 64, 4, 4, 8), (8, 128, 4, 3, 8), (16, 128, 4, 3, 4), (16, 64, 4, 5, 4), (32, 64, 8, 4, 4),
    (32, 128, 8, 3, 4), (32, 64, 4, 5, 2),
]  # fmt: skip
MANY_TILES = [  # rows, outputs, bytes, warps, stages
    (64, 32, 64, 4, 3), (64, 64, 64, 8, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 64, 128, 8, 2),
    (32, 64, 64, 4, 4), (32, 128, 64, 8, 3), (128, 64, 64, 8, 2),
]  # fmt: skip
FP8_TILES = [
    (32, 128, 128, 8, 4),
    (32, 128, 128, 8, 3),
    (32, 128, 128, 4, 4),
    (16, 128, 128, 8, 4),
    (32, 64, 128, 4, 5),
    (64, 128, 128, 8, 4),
    (64, 128, 128, 8, 3),
    (64, 128, 128, 8, 2),
    (64, 128, 128, 4, 4),
    (64, 256, 128, 8, 3),
    (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
]


def random_stack(form: str, experts: int, outputs: int, inputs: int) -> Any:
    """Return random weights [experts, outputs, inputs] in the form."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    size = inputs**-0.5
    form = form.removeprefix("next-")
    if form.endswith("bf16"):
        return torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16) * size
    if form == "mxfp4":
        scale = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8, device="cuda")
        return Fp4Weight(codes(experts, outputs, inputs // 2), scale)
    if form == "int4":
        groups = (experts, outputs, inputs // 128)
        zero = torch.randint(5, 11, groups, dtype=torch.uint8, device="cuda")
        return IntGroupWeight(
            codes(experts, outputs, inputs // 2), 4, (uniform(*groups) * size / 5).half(), zero
        )
    numbers = torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16).mul_(100)
    scales = (experts, outputs // 128, inputs // 128) if form == "fp8-block" else (experts, outputs, 1)
    rounding = "block" if form == "fp8-block" else "token"
    return Fp8Weight(
        numbers.clamp_(-448, 448).to(torch.float8_e4m3fn), uniform(*scales) * size / 100, rounding
    )


def layers_of(form: str) -> list[Any]:
    """Return enough layers that their weights exceed the cache several times."""
    case, made = CASES[form], []
    env: Any = SimpleNamespace(weights=SimpleNamespace(when_loaded=lambda action: action()))
    while len(made) < 2 or sum(stored_bytes(one) for one in made) < 1.5e9:
        stacks = (random_stack(form, case.experts, 2 * case.width, case.hidden),
                  random_stack(form, case.experts, case.hidden, case.width))  # fmt: skip
        biases = ()
        if case.biased:
            biases = tuple(
                torch.randn(case.experts, n, device="cuda").bfloat16() for n in (2 * case.width, case.hidden)
            )
        weights = ExpertWeights(*stacks, *biases)
        layer = (
            FusedExperts(weights, case.kind)
            if form.endswith("bf16")
            else fused_quantised(env, weights, case.kind)
        )
        assert layer is not None
        made.append(layer)
    return made


def stored_bytes(layer: Any) -> int:
    """Return the bytes of all experts' matrices."""
    if isinstance(layer, FusedExperts):
        return layer.gate_up.nbytes + layer.down.nbytes
    tensors = [getattr(w, name) for w in (layer.gate_up, layer.down) for name in ("codes", "scale", "zero")]
    return sum(one.nbytes for one in tensors if one is not None)


def timed_us(call: Call, sets: int) -> float:
    """Return the time of one call, the best of three replays of a graph of several."""
    call(0)
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), max(sets, 12 // sets * sets)
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    return best


class Steps:
    """The calls of one form and one number of tokens."""

    def __init__(self, form: str, tokens: int, layers: list[Any]) -> None:
        self.case, self.form, self.tokens, self.layers = CASES[form], form, tokens, layers
        make = torch.Generator(device="cuda").manual_seed(tokens)
        self.x = torch.randn(tokens, self.case.hidden, device="cuda", generator=make).bfloat16()
        logits = torch.randn(tokens, self.case.experts, device="cuda", generator=make)
        self.choice: ExpertChoice = route(
            logits, None, rule_arguments(self.case.experts, self.case.top_k, renormalise=True)
        )
        self.met = len(self.choice.ids.unique())

    def limit_us(self, part: float = 1.0) -> float:
        """Return the least time of the layer, or of `part` of its weights."""
        layer = self.layers[0]
        read = stored_bytes(layer) * self.met / self.case.experts / BANDWIDTH
        in_fp8 = isinstance(layer, QuantisedExperts) and layer.rounds
        sums = (
            6
            * self.tokens
            * self.case.top_k
            * self.case.hidden
            * self.case.width
            / FLOPS
            / (2 if in_fp8 else 1)
        )
        return part * max(read, sums) * 1e6

    def variants(self, sweep: bool) -> Iterator[tuple[str, Call, float]]:
        """Yield name, call and limit of each variant."""
        yield "layer", lambda i: self.layers[i](self.x, self.choice), self.limit_us()
        yield "layer again", lambda i: self.layers[i](self.x, self.choice), self.limit_us()
        if not sweep or self.form.endswith("bf16"):
            return
        first, second = self.limit_us(2 / 3), self.limit_us(1 / 3)
        if self.tokens <= FEW_TOKENS:
            h = few_packed_gate_up(self.x, self.layers[0].gate_up, None, self.choice, self.case.kind)
            for tile in FEW_TILES:
                yield f"gate_up {tile}", lambda i, t=tile: self.few_gate_up(i, t), first
                yield f"down {tile}", lambda i, t=tile: self.few_down(i, h, t), second
            return
        yield from self.many_variants(first, second)

    def few_gate_up(self, i: int, tile: Any) -> Any:
        layer = self.layers[i]
        return few_packed_gate_up(
            self.x, layer.gate_up, layer.weights.gate_up_bias, self.choice, self.case.kind, tile
        )

    def few_down(self, i: int, h: torch.Tensor, tile: Any) -> Any:
        layer = self.layers[i]
        arrived = layer.arrived
        return few_packed_down(h, layer.down, layer.weights.down_bias, self.choice, arrived, tile)

    def many_variants(self, first: float, second: float) -> Iterator[tuple[str, Call, float]]:
        dtype, x, scales = torch.bfloat16, self.x, None
        if in_fp8 := self.layers[0].in_fp8:
            by_group = self.layers[0].gate_up.group > 0
            x, scales, _ = round_fp8(self.x, by_group)
            yield "round", lambda i: round_fp8(self.x, by_group), 0.0
        default = packed_tiles_for(self.tokens * self.case.top_k / self.case.experts, in_fp8)[0]
        grouped = group(self.choice, self.case.experts, default.rows)
        h, h_scales = many_packed_gate_up(
            x, scales, self.layers[0].gate_up, None, grouped, self.case.kind, default, dtype
        )
        rows = torch.randn(len(grouped.source), self.case.hidden, device="cuda").bfloat16()
        yield "group", lambda i: group(self.choice, self.case.experts, default.rows), 0.0
        yield "weighted sum", lambda i: weighted_sum(rows, grouped.place, self.choice.weights), 0.0
        wanted = {16: (0, 16), 32: (4, 1e9 if in_fp8 else 48), 64: (8, 1e9), 128: (32, 1e9)}
        mean = self.tokens * self.case.top_k / self.case.experts
        for sizes in FP8_TILES if in_fp8 else MANY_TILES:
            if not wanted[sizes[0]][0] <= mean <= wanted[sizes[0]][1]:
                continue
            for by_rows in (False, True) if mean > 100 else (False,):
                tile = GroupedTile(*sizes, by_rows)
                g = group(self.choice, self.case.experts, tile.rows)

                def gate_up(i: int, t: GroupedTile = tile, g: Any = g) -> Any:
                    w = self.layers[i]
                    return many_packed_gate_up(
                        x, scales, w.gate_up, w.weights.gate_up_bias, g, self.case.kind, t, dtype
                    )

                def down(i: int, t: GroupedTile = tile, g: Any = g) -> Any:
                    w = self.layers[i]
                    return many_packed_down(h, h_scales, w.down, w.weights.down_bias, g, t, dtype)

                name = f"{sizes}{' by rows' * by_rows}"
                if not in_fp8 or sizes[1] == 128:
                    yield f"gate_up {name}", gate_up, first
                yield f"down {name}", down, second

        def parts(i: int, which: str) -> Any:
            w, codes, code_scales = self.layers[i], x, scales
            tiles = packed_tiles_for(mean, in_fp8)
            g = grouped
            if "r" in which and in_fp8:
                codes, code_scales, _ = round_fp8(self.x, by_group)
            if "g" in which:
                g = group(self.choice, self.case.experts, default.rows)
            made = (h, h_scales)
            if "u" in which:
                made = many_packed_gate_up(
                    codes, code_scales, w.gate_up, w.weights.gate_up_bias, g, self.case.kind, tiles[0], dtype
                )
            if "d" in which:
                many_packed_down(*made, w.down, w.weights.down_bias, g, tiles[1], dtype)

        for which in ("gu", "ud", "gud", "rgud"):
            yield f"parts {which}", lambda i, p=which: parts(i, p), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="bf16,fp8-block,int4,gpt-oss-bf16,mxfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 2048])
    parser.add_argument("--sweep", action="store_true", help="also time candidate tiles")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "quantised-experts.json"
    )
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for form in args.cases.split(","):
        layers = layers_of(form)
        steps = [Steps(form, tokens, layers) for tokens in args.tokens]
        with background_compilation(torch.device("cuda", 0)):
            for one in steps:
                attempt(one, args.sweep)
        for one in steps:
            for name, call, limit in one.variants(args.sweep):
                try:
                    us = timed_us(call, len(layers))
                except Exception as error:  # one that fails must not hide the others
                    print(
                        f"{form} {one.tokens} {name}: {type(error).__name__}: {str(error)[:150]}", flush=True
                    )
                    continue
                results.append(
                    {"form": form, "tokens": one.tokens, "name": name, "us": us, "limit_us": limit}
                )
                print(
                    f"{form:13}{one.tokens:>6} {name:<34}{us:>9.1f} us {100 * limit / us:>5.0f} % of limit",
                    flush=True,
                )
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}))
        del layers, steps, one
        torch.cuda.empty_cache()


def attempt(steps: Steps, sweep: bool) -> None:
    """Launch every variant once, to compile it."""
    for _, call, _ in steps.variants(sweep):
        try:
            call(0)
        except Exception as error:
            print(f"{steps.form} {steps.tokens}: {type(error).__name__}: {str(error)[:150]}", flush=True)


if __name__ == "__main__":
    main()
