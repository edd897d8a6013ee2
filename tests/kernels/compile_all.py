"""Compile every kernel as its wrapper launches it, for GPUs that are not present, and check its shared memory.

    python tests/kernels/compile_all.py [--targets 75,90,...] [--models NAME,...] [--dtypes half,float32]
                                        [--kernels NAME,...] [--sample] [--binary] [--forbid NAME,...]
                                        [--most NAME:COUNT] [--loops NAME:BARRIERS]

Prints the largest shared memory of a program by model and target. Exits with 1 if a kernel does not compile, needs more
shared memory than the target has, contains an instruction that `--forbid` names by its beginning, has more instructions of
the full name in `--most` than it allows, or has a loop with the instruction that `--loops` names and with more barriers
than it allows. `--sample` takes only the first variant of each kernel in each model. Without `--binary`, `--forbid`,
`--most` or `--loops`, compilation stops before the assembler, when shared memory is already known.

A driver that only names its target replaces the device, and launches are recorded instead of run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from targets import TARGETS, TargetDriver
from triton import knobs
from triton.runtime import driver, jit
from triton.tools.disasm import get_sass

from quire.attention.triton import TritonAttention
from quire.kernels import (
    activation,
    batch,
    block_copy,
    collective,
    draft_pairs,
    ngram,
    norm,
    open_gate,
    rope,
    sum_and_norm,
    two_trip,
)
from quire.kernels import target as targets
from quire.kernels.attention import (
    expanded,
    kv_write,
    latent,
    latent_write,
    long,
    shared,
    short,
    sparse,
    tile,
)
from quire.kernels.experts.route import FEW_TOKENS, rule_arguments
from quire.kernels.experts.router import norm_and_route, route_all
from quire.kernels.matmul import (
    by_head,
    gemv,
    grouped,
    nibble_gemv,
    nibble_rows,
    packed,
    rescale,
    round_fp8,
    unpack,
)
from quire.kernels.sampling import choose, masks, penalties
from quire.kernels.sampling.row import COLUMNS
from quire.kernels.state import conv, delta_step, gates, recurrence, selective_scan
from quire.kernels.state.rows import StateRows
from quire.kernels.target import Target
from quire.layers.expert_weights import ExpertWeights
from quire.layers.fused_experts import FusedExperts
from quire.layers.quantised_experts import QuantisedExperts, fused_quantised
from quire.quant.few_rows import FewRowsMatmul
from quire.quant.forms import Fp4Weight, Fp8Weight, IntGroupWeight, QuantisedWeight

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model that kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocab: int
    window: int | None = None
    cap: float | None = None
    experts: int = 0
    kind: str | None = "silu"  # None: LayerNorm, and an MLP without a gate
    rank: int = 0  # of latent attention, whose entries have `dim` numbers; 0: none
    sinks: bool = False
    span: int = 0  # distance between the dimensions of a rotated pair; 0: half a head
    states: tuple[int, int, int] = (0, 0, 0)  # value heads, key size and value size of layers with states


MODELS = {
    "GPT-2": Shapes(12, 12, 64, 768, 3072, 50257, kind=None),
    "Qwen2.5 0.5B": Shapes(14, 2, 64, 896, 4864, 151936),
    "Qwen2.5 7B": Shapes(28, 4, 128, 3584, 18944, 152064),
    "Qwen3 0.6B": Shapes(16, 8, 128, 1024, 3072, 151936),
    "Qwen3 30B-A3B": Shapes(32, 4, 128, 2048, 768, 151936, experts=128),
    "Llama 3.2 1B": Shapes(32, 8, 64, 2048, 8192, 128256),
    "Llama 3.1 8B": Shapes(32, 8, 128, 4096, 14336, 128256),
    "Llama 3.1 70B": Shapes(64, 8, 128, 8192, 28672, 128256),
    "Mistral 7B v0.1": Shapes(32, 8, 128, 4096, 14336, 32000, window=4096),
    "Mixtral 8x7B": Shapes(32, 8, 128, 4096, 14336, 32000, experts=8),
    "Gemma 3 1B": Shapes(4, 1, 256, 1152, 6912, 262144, window=512, cap=50.0, kind="gelu_tanh"),
    "Gemma 3 4B": Shapes(8, 4, 256, 2560, 10240, 262208, window=1024, kind="gelu_tanh"),
    "Gemma 3 27B": Shapes(32, 16, 128, 5376, 21504, 262208, window=1024, kind="gelu_tanh"),
    "DeepSeek V2 Lite": Shapes(16, 1, 576, 2048, 10944, 102400, rank=512),
    "DeepSeek V3": Shapes(128, 1, 576, 7168, 18432, 129280, rank=512),
    "gpt-oss 20B": Shapes(64, 8, 64, 2880, 2880, 201088, window=128, experts=32, sinks=True),
    "GLM-4 9B": Shapes(32, 2, 128, 4096, 13696, 151552, span=1),
    "Phi-4 mini": Shapes(24, 8, 128, 3072, 8192, 200064, span=48),
    "Qwen3-Next 80B-A3B": Shapes(16, 2, 256, 2048, 512, 151936, experts=512, states=(32, 128, 128)),
    "Nemotron Nano 9B v2": Shapes(40, 8, 128, 4480, 15680, 131072, states=(128, 128, 80)),
    "192 wide heads": Shapes(16, 16, 192, 2048, 8192, 32000),
}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# ------------------------------------------------------------------------------------------ launches


def latent_attention(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    if not model.rank or not TritonAttention.fits_latent(model.heads, model.dim, dtype.itemsize, target):
        return
    zeros = partial(torch.zeros, dtype=dtype)
    heads, rank, rotary = model.heads, model.rank, model.dim - model.rank
    q, entries, out = zeros(64, heads, model.dim), zeros(9, 16, model.dim), zeros(64, heads * rank)
    latent_write.store_latent(
        q, q[..., rank:], q[:, 0], zeros(rank), 1e-6, longs(64), zeros(99, rotary), 1, entries, longs(64)
    )
    for splits in (64, 1):
        for starts in (ints(65), None):
            attend = partial(latent.attend_latent_ones, q, entries, out, ints(64), starts, ints(64, 256))
            attend(longs(64), 0.1, splits)
    latent.attend_latent_tiles(q, entries, out, ints(64, 256), ints(9, 8), 0.1)
    for inputs, outputs in ((128, rank), (rank, 128)):  # the keys' and the values' side of absorbed attention
        matrices = zeros(heads, 256, rank)[:, :128]
        matrices = matrices if inputs == 128 else matrices.transpose(1, 2)
        by_head.product_by_head(zeros(1, heads, inputs), matrices, zeros(1, heads, outputs))
    keys = zeros(9, 16, 128)
    sparse.write_keys(zeros(64, 128), keys, longs(64))
    where = longs(64), longs(64), ints(64, 256)  # positions, owners, block table
    chosen = sparse.choose_tokens(zeros(64, 64, 128), torch.zeros(64, 64), keys, *where, 2048, 4096)
    sparse.attend_chosen(q, entries, out, chosen, *where, 0.1)
    few = longs(1), longs(1), ints(64, 256)
    sparse.attend_chosen(q[:1], entries, out[:1], chosen[:1], *few, 0.1)


def expanded_latents(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    """Launch the kernel of expanded latents for heads of DeepSeek, and of GLM-4.7-Flash, whose are the widest."""
    if not model.rank:
        return
    zeros, rotary = partial(torch.zeros, dtype=dtype), model.dim - model.rank
    for content, value in ((128, 128), (192, 256)):
        q, out = zeros(64, model.heads, content + rotary), zeros(64, model.heads, value)
        carried = torch.zeros(out.shape), torch.zeros(64, model.heads, 2)
        for sums in (carried, None):
            expanded.attend_expanded_tiles(
                q, zeros(64, model.heads, content + value), zeros(64, model.dim)[:, model.rank :], out, sums, ints(8),
                ints(9, 8), 0.1,
            )  # fmt: skip


def coded_attention(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    """Launch the kernels that read and write codes of keys and values."""
    if model.rank or dtype == torch.float32:
        return
    heads, kv_heads, dim, rows = model.heads, model.kv_heads, model.dim, 64
    group = heads // kv_heads
    q, out = torch.zeros(rows, heads, dim, dtype=dtype), torch.zeros(rows, heads * dim, dtype=dtype)
    table, lens, starts, slots = ints(rows, 8), ints(rows), ints(rows + 1), longs(rows)
    queries = max(short.SHORT_ROWS // group, 1)
    tiles = long.list_tiles(
        starts, lens, slots, 9, queries, long.long_tokens(dim, dtype.itemsize, group, target, True), 1
    )
    for codes in (torch.float8_e4m3fn, torch.int8) if target.has_fp8 else (torch.int8,):
        keys = torch.zeros(9, kv_heads, 16, dim, dtype=torch.uint8).view(codes)
        for static in (False, True):
            each = torch.zeros(1, kv_heads, 1, 1).expand(9, kv_heads, 16, 1)
            scales = tile.KVScales(*([each if static else each.contiguous()] * 2), static)
            partial_sums = shared.attend_shared(
                q, keys, keys, ints(rows, 4)[:, 3], table, slots, 0.1, None, scales
            )
            attend = partial(short.attend_short, q, keys, keys, out, lens, scales=scales)
            attend(None, table, slots, 0.1, prefix=partial_sums)
            attend(starts, table, slots, 0.1, queries=queries, splits=64)
            long.attend_long(q, keys, keys, out, table, tiles, 0.1, scales=scales)
            kv_write.write_kv(q[:, :kv_heads], q[:, :kv_heads], keys, keys, slots, scales)
            packed = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
            rope.norm_rotate_store(
                packed, slots, torch.zeros(99, dim, dtype=dtype), None, 0.0, keys, keys, slots, scales=scales
            )


def attention(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    if model.rank:
        return
    zeros = partial(torch.zeros, dtype=dtype)
    heads, kv_heads, dim, cap = model.heads, model.kv_heads, model.dim, model.cap
    rows, group = 64, model.heads // model.kv_heads
    q, keys, values = zeros(rows, heads, dim), zeros(9, kv_heads, 16, dim), zeros(9, kv_heads, 16, dim)
    table, out, lens, starts = ints(rows, 8), zeros(rows, heads * dim), ints(rows), ints(rows + 1)
    slots = longs(rows)
    queries = max(short.SHORT_ROWS // group, 1)
    partial_sums = shared.attend_shared(q, keys, values, ints(rows, 4)[:, 3], table, slots, 0.1, cap)
    sinks = torch.zeros(heads) if model.sinks else None
    attend = partial(short.attend_short, q, keys, values, out, lens, sinks=sinks)
    for window in dict.fromkeys((model.window, None)):  # the largest variant first, for a sample
        attend(starts, table, slots, 0.1, window, cap, queries, 64)
        for splits in (1, 64):
            attend(None, table, slots, 0.1, window, cap, 1, splits)
        per_tile = long.long_tokens(dim, dtype.itemsize, group, target)
        tiles = long.list_tiles(starts, lens, slots, 9, queries, per_tile, kv_heads)
        long.attend_long(q, keys, values, out, table, tiles, 0.1, window, cap, sinks)
    attend(None, table, slots, 0.1, None, cap, 1, 1, partial_sums)
    many = 4 * target.sms // kv_heads  # with this many rows the buffers of a program are smaller
    short.attend_short(
        zeros(many, heads, dim),
        keys,
        values,
        zeros(many, heads * dim),
        ints(many),
        None,
        ints(many, 8),
        longs(many),
        0.1,
    )
    qkv, weight = zeros(rows, (heads + 2 * kv_heads) * dim), zeros(heads + kv_heads, dim)
    store = partial(
        rope.norm_rotate_store, qkv, longs(rows), zeros(100, dim), weight, 1e-6, keys, values, longs(rows)
    )
    store(model.span)
    kv_write.write_kv(q[:, :kv_heads], q[:, :kv_heads], keys, values, longs(rows))


def layers(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    x = torch.zeros(7, model.hidden, dtype=dtype)
    if model.kind is None:
        norm.add_layer_norm(x, x, x[0], x[0], 1e-6)
    else:
        norm.add_rms_norm(x, x, x[0], 1e-6)
        activation.gated(torch.zeros(7, 2 * model.intermediate, dtype=dtype), model.kind)
        open_gate.open_gate(x, x)
        if target.has_fp8 and x.shape[1] % 128 == 0:
            open_gate.open_gate_rounded(x, x, True)


def few_rows(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    """Launch the products of a layer, for the numbers of rows that `FewRowsMatmul` runs itself."""
    zeros = partial(torch.zeros, dtype=dtype)
    qkv, attended = (model.heads + 2 * model.kv_heads) * model.dim, model.heads * model.dim
    gates = 1 if model.kind is None else 2
    products = [(qkv, model.hidden), (model.hidden, attended), (model.vocab, model.hidden)]
    if not model.experts:
        products += [(gates * model.intermediate, model.hidden), (model.hidden, model.intermediate)]
    for outputs, inputs in products:
        weight = torch.empty(outputs, inputs, dtype=dtype)
        if not FewRowsMatmul.takes(weight):
            continue
        matmul = FewRowsMatmul(weight, None)
        for rows in (1, 2, 8, 16):
            x = zeros(rows, inputs)
            if rows <= matmul.added_rows and outputs != model.vocab:
                matmul.add(x, zeros(rows, outputs))
                kind = model.kind if outputs == 2 * model.intermediate else None
                matmul.after_norm(zeros(inputs), 1e-6, kind)(x, x)
            if rows <= matmul.most_rows:
                matmul(x)


def quantised(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    """Launch the products with quantised weights of an MLP, for the numbers of rows with different tiles."""
    if not target.has_matrix_units or dtype == torch.float32:
        return
    arrived, scales = ints(packed.MOST_TILES), torch.ones
    for outputs, inputs in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
        codes, four = torch.zeros(outputs, inputs, dtype=torch.uint8), inputs // 2
        half = packed.half_for(64, inputs)
        weights = [
            packed.PackedTensors("fp8", codes, inputs, scales(outputs), 0),
            packed.PackedTensors(
                "fp8", codes, inputs, scales(-(-inputs // 128), -(-outputs // 128)), 128, 128
            ),
            packed.PackedTensors("byte", codes, inputs, scales(outputs), 0),
        ]
        if half:
            of_group, nibbles = scales(inputs // 64, outputs, dtype=dtype), codes[:, :four].contiguous()
            zeros = codes[:, : inputs // 64].t().contiguous()
            weights.append(packed.PackedTensors("int4", nibbles, inputs, of_group, 64, zero=zeros, half=half))
            weights.append(packed.PackedTensors("fp4", nibbles, inputs, zeros, 64, half=half))
        for weight in weights:
            for rows in (1, 16, 64, 256):
                x = torch.zeros(rows, inputs, dtype=dtype)
                packed.packed_product(x, weight, None, arrived)
                if nibble_rows.takes_rows(weight):
                    nibble_rows.nibble_rows(x, weight, None, arrived)
                    nibble_rows.nibble_rows(x, weight, None, arrived, kind=model.kind)
                if outputs == 2 * model.intermediate:
                    packed.packed_product(x, weight, None, arrived, kind=model.kind)
                if weight.format == "fp8" and target.capability >= 90:
                    x_scale = scales(rows, 1 if weight.group == 0 else -(-inputs // 128))
                    packed.packed_product(
                        x.to(torch.uint8), weight, None, arrived, x_scale=x_scale, dtype=dtype
                    )
                    round_fp8.round_fp8(x, weight.group > 0)
            unpack.unpack(weight, dtype)
            one_row(weight, torch.zeros(1, inputs, dtype=dtype), target)


def one_row(weight: packed.PackedTensors, x: torch.Tensor, target: Target) -> None:
    """Launch the matrix-vector products with a quantised weight."""
    if nibble_gemv.takes_nibbles(weight):
        nibble_gemv.nibble_gemv(x, weight, None)
        nibble_gemv.nibble_gemv(x, weight, None, residual=x, norm=x[0], eps=1e-6, kind="silu")
    elif weight.format == "byte" or (weight.format == "fp8" and target.has_fp8):
        codes = weight.codes.view(torch.int8 if weight.format == "byte" else torch.float8_e4m3fn)
        gemv.gemv(x, codes, None, None, weight.scale)
        gemv.norm_gemv(x, x, x[0], 1e-6, codes, None, "silu", weight.scale)
        rescale.rescale(
            torch.zeros(2, weight.outputs, dtype=x.dtype), x[0].float(), torch.ones(weight.outputs)
        )


def experts(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    if not model.experts:
        return
    hidden, width, top_k = model.hidden, model.intermediate, min(8, model.experts // 4)
    gate_up = torch.empty(model.experts, 2 * width, hidden, dtype=dtype)
    down = torch.empty(model.experts, hidden, width, dtype=dtype)
    if dtype == torch.float32 or not target.has_matrix_units:
        for weight in (gate_up, down):
            x = torch.zeros(64, weight.shape[2], dtype=dtype)
            grouped.grouped_product(x, weight, ints(model.experts))
        return
    fused = FusedExperts(ExpertWeights(gate_up, down), "silu")
    quantised = quantised_experts(model.experts, hidden, width)
    router, arrived = torch.zeros(model.experts + 1, hidden, dtype=dtype), ints(1)
    rules = (
        rule_arguments(model.experts, top_k),
        rule_arguments(model.experts, top_k, True, True, 2.5, 2, 1, True),
        rule_arguments(model.experts, top_k, shared=1, shared_gate=True),
    )
    for tokens in (16, 1, 64, 256, 1024, 8192):
        x = torch.zeros(tokens, hidden, dtype=dtype)
        for rule in reversed(rules):
            choice = route_all(x, router[: rule["E"] + rule["SHARED_GATE"]], None, None, rule, arrived)
        if tokens <= FEW_TOKENS:
            correction, weight = torch.zeros(model.experts), router[: model.experts]
            norm_and_route(x, x, x[0], 1e-6, weight, None, correction, rules[0], arrived)
        fused(x, choice)
        for layer in quantised:
            layer(x, choice)


def quantised_experts(count: int, hidden: int, width: int) -> list[QuantisedExperts]:
    """Return a layer of experts in each format."""

    def stack(form: str, outputs: int, inputs: int) -> QuantisedWeight:
        codes, halves = (torch.empty(count, outputs, n, dtype=torch.uint8) for n in (inputs, inputs // 2))
        if form == "fp8":
            scale = torch.empty(count, -(-outputs // 128), -(-inputs // 128))
            return Fp8Weight(codes.view(torch.float8_e4m3fn), scale, "block")
        if form == "fp4":
            return Fp4Weight(halves, torch.empty(count, outputs, inputs // 32, dtype=torch.uint8))
        groups = (count, outputs, inputs // 64)
        zero = torch.empty(groups, dtype=torch.uint8)
        return IntGroupWeight(halves, 4, torch.empty(groups, dtype=torch.float16), zero)

    layers = []
    for form in ("fp8", "fp4", "int4"):
        weights = ExpertWeights(stack(form, 2 * width, hidden), stack(form, hidden, width))
        env: Any = SimpleNamespace(weights=SimpleNamespace(when_loaded=lambda action: None))
        layer = fused_quantised(env, weights, "silu")
        assert layer is not None
        layer.gate_up, layer.down = (
            replace(w, scale=w.scale.mT.contiguous(), zero=None if w.zero is None else w.zero.mT.contiguous())
            for w in (layer.gate_up, layer.down)
        )
        layers.append(layer)
    return layers


def step(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    header, tokens, column, table, turn = (
        ints(1025, 4),
        ints(1025, 4096),
        ints(1025),
        ints(1025, 256),
        ints(1),
    )
    for ones, places, logits in ((True, 256, 256), (False, 512, 256), (False, 512, 512)):
        batch.prepare(
            header, 256, places, ones, tokens, column, column, [table], 16, turn, 3, 1024, longs(512), longs(512),
            longs(1, 512), ints(257), ints(256), longs(256), longs(logits), longs(logits), ints(logits), ints(256),
        )  # fmt: skip
    for drafts in (0, 5):
        ring = ints(3, 1024, 1 + drafts)
        batch.advance(
            header, 256, bool(drafts), ints(512), ints(256), tokens, column, column, turn, ring, 1024, True
        )
    ngram.propose(tokens, column, header[:256, 0], ints(256), 5, 4)
    pairs = draft_pairs.make_pairs(tokens, column, longs(1025), [table], header[:8, 0], ints(8), 0, 4, 16, 38)
    draft_pairs.write_drafts(tokens, pairs.slots, ints(8), pairs.lengths, ints(8), 0)
    states = torch.empty(32, model.hidden, dtype=dtype)
    draft_pairs.keep_states(
        states, states, pairs.positions, pairs.positions, pairs.query_start, pairs.seq_lens, pairs.slots, 38
    )
    draft_pairs.spread(torch.empty(8, 32000, dtype=dtype), ints(model.vocab))
    for size in (4096, 3):  # in words and in bytes
        block_copy.BlockCopy(CPU, [0, 0], [0, 0], [size, size])


def sample(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    slots, parameters = longs(256), longs(257, len(COLUMNS))
    for vocab in (model.vocab, 1):  # a launch argument of 1 is a constant to the compiler
        scratch = choose.Scratch.empty(257, vocab, CPU)
        logits = torch.empty(256, vocab, dtype=dtype)
        choose.choose(logits, slots, parameters, ints(257), scratch, ints(256), True)
    masks.apply_masks(logits, slots[:3], ints(3, -(-model.vocab // 32)))
    penalties.penalise(
        torch.empty(256, model.vocab), slots, longs(257, len(penalties.COLUMNS)), ints(257, 4096), ints(257),
        ints(257), torch.empty(penalties.PROGRAMS, model.vocab, dtype=torch.int32),
    )  # fmt: skip


def ranks(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    for size in (2, 4, 8):
        x = torch.empty(8, model.hidden, dtype=dtype)
        collective.all_reduce(x, longs(size), ints(collective.MAX_BLOCKS), 0, size)
        two_trip.all_reduce(x, longs(size), ints(two_trip.MAX_BLOCKS), 0, size)
        if sum_and_norm.takes(x):
            calls, weight = ints(sum_and_norm.MAX_ROWS), torch.empty(model.hidden, dtype=dtype)
            sum_and_norm.all_reduce_add_norm(x, x, weight, 1e-6, longs(size), calls, 0, size)


def states(model: Shapes, dtype: torch.dtype, target: Target) -> None:
    heads, key, value = model.states
    if not heads:
        return
    tokens, rows = 64, StateRows(longs(8), ints(9), torch.zeros(8, dtype=torch.bool))
    q, v = torch.empty(tokens, heads // 2, key, dtype=dtype), torch.empty(tokens, heads, value, dtype=dtype)
    matrices, gate = torch.empty(9, heads, key, value), torch.empty(tokens, heads)
    x, window = torch.empty(tokens, 4096, dtype=dtype), torch.empty(9, 3, 4096, dtype=dtype)
    for each in (rows, replace(rows, targets=longs(tokens))):
        for inputs in (x, torch.empty(4 * tokens, 4096, dtype=dtype)):
            conv.causal_conv(inputs, torch.empty(4, 4096), None, window, each, "silu")
        recurrence.recurrence(q, q, v, gate, gate, matrices, each, 0.1, True)
        recurrence.recurrence(q, q, v, gate, None, matrices, each)
        channels = torch.empty(tokens, heads, key)
        recurrence.recurrence(q, q, v, channels, gate, matrices, each, 0.1, True)
        b, step = torch.empty(tokens, 16, dtype=dtype), torch.empty(tokens, 4096)
        scan_state, rate = torch.empty(9, 4096, 16), torch.empty(4096, 16)
        selective_scan.selective_scan(x, step, rate, b, b, torch.empty(4096), scan_state, each)
    vectors, rates = torch.empty(8, heads, value, dtype=dtype), torch.empty(8, heads, dtype=dtype)
    gates.delta_gates(rates, rates, gate[0], gate[0])
    gates.gated_norm(vectors, vectors, matrices[0, 0, 0], 1e-6)
    if target.has_fp8 and value == 128:
        gates.rounded_norm(vectors, vectors, matrices[0, 0, 0], 1e-6, True)
    channels, ones = heads * (key + value), replace(rows, short_only=True)  # half as many key heads
    of_heads, window = torch.empty(heads), torch.empty(9, 3, channels, dtype=dtype)
    sizes = heads // 2, key, heads, value
    run = delta_step.make_delta_step(
        *sizes, torch.empty(4, channels), of_heads, of_heads, matrices[0, 0, 0], 1e-6
    )
    assert run is not None
    parts = torch.empty(8, channels + heads * (value + 2), dtype=dtype).split(
        [channels, heads * value, heads, heads], 1
    )
    run(*parts, window, matrices, ones)


PARTS: tuple[Callable[[Shapes, torch.dtype, Target], None], ...] = (
    attention,
    coded_attention,
    latent_attention,
    expanded_latents,
    layers,
    few_rows,
    quantised,
    experts,
    step,
    sample,
    ranks,
    states,
)


# --------------------------------------------------------------------------------------- compilation


@dataclass(slots=True)
class Launches:
    """The distinct kernels that were launched, by model, with the arguments of their compilation."""

    kernels: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    by_model: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    model: str = ""
    fresh: Callable[[str], bool] = lambda name: True  # whether to record a launch of the kernel of this name

    def note(self, **launch: Any) -> bool:
        kernel = launch["fn"].jit_function
        if self.fresh(kernel.__name__):
            name = (kernel.__name__, launch["key"])
            self.kernels[name] = kernel, launch["compile"]["specialization_data"]
            self.by_model.setdefault(self.model, set()).add(name)
        return True  # tells Triton not to compile


@contextmanager
def noted(target: Target, capability: int) -> Iterator[Launches]:
    """Record launches instead of running them, with tile sizes for `target`, for a device of this capability."""
    driver.set_active(TargetDriver(capability))
    launches, launch = Launches(), jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    targets.KNOWN_TARGETS[CPU] = target
    jit.JITFunction.run, knobs.runtime.jit_cache_hook = run, launches.note
    try:
        yield launches
    finally:
        jit.JITFunction.run, knobs.runtime.jit_cache_hook = launch, None


def stop_at_assembler(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """Replace the compiler stages after LLVM by empty ones. Without arguments, return the cache key of such kernels."""
    if stages is None:
        return "unassembled", "unassembled"

    def ptx(source: Any, metadata: Any) -> str:
        metadata["name"] = "unassembled"
        return ""

    stages["ptx"], stages["cubin"] = ptx, lambda source, metadata: b""
    return None


@dataclass(slots=True)
class Compiled:
    name: str
    shared_bytes: int = 0
    error: str = ""


def instructions(cubin: bytes, wanted: Sequence[str]) -> str:
    """Return those instructions of a kernel that begin with one of `wanted`, and how many there are; empty: none."""
    found = re.findall(rf"\b(?:{'|'.join(map(re.escape, wanted))})[.\w]*", get_sass(cubin))
    return ", ".join(f"{count} {name}" for name, count in Counter(found).items())


def too_many(cubin: bytes, rule: str) -> str:
    """Return how many instructions a kernel has of a name, if more than `rule` allows, such as LDGSTS.E:7; empty: no."""
    name, _, most = rule.partition(":")
    count = len(re.findall(rf"\b{re.escape(name)}(?![.\w])", get_sass(cubin)))
    return f"{count} {name}" if count > int(most) else ""


def waiting_loops(cubin: bytes, rule: str) -> str:
    """Return how many loops have more barriers than `rule` allows, such as REDUX:0 for loops with REDUX; empty: none."""
    lines, starts, waiting = get_sass(cubin).split("\n"), dict[str, int](), 0
    name, _, most = rule.partition(":")
    for number, line in enumerate(lines):
        if label := re.match(r"(LBB\d+):", line):
            starts[label[1]] = number
        elif (back := re.search(r"\bBRA (LBB\d+)", line)) and back[1] in starts:
            body = "\n".join(lines[starts[back[1]] : number])
            waiting += name in body and body.count("BAR.") > int(most)
    return f"{waiting} loops with {name} and more than {most} barriers" if waiting else ""


def compile_one(
    item: tuple[tuple[str, str], tuple[Any, str]], forbidden: Sequence[str], most: str, loops: str
) -> Compiled:
    (name, _), (kernel, data) = item
    try:
        done = kernel.preload(data)
        found = instructions(done.asm["cubin"], forbidden) if forbidden else ""
        found = found or (too_many(done.asm["cubin"], most) if most else "")
        found = found or (waiting_loops(done.asm["cubin"], loops) if loops else "")
        return Compiled(name, done.metadata.shared, found and f"contains {found}")
    except Exception as error:  # any error of the compiler
        return Compiled(name, error=f"{type(error).__name__}: {error}"[:3000])


def dtype_of(name: str, target: Target) -> torch.dtype:
    """Return the dtype of a name; `half` is the 16-bit dtype that the target uses for a bfloat16 checkpoint."""
    if name == "half":
        return torch.bfloat16 if target.has_bf16 else torch.float16
    return torch.float32


def chosen(kernels: str, sample: bool) -> Callable[[str], bool]:
    """Return a filter of kernel names: those of `kernels` (empty: all), and with `sample` each only once."""
    wanted, seen = set(kernels.split(",")) - {""}, set[str]()

    def fresh(name: str) -> bool:
        if (wanted and name not in wanted) or (sample and name in seen):
            return False
        seen.add(name)
        return True

    return fresh


def compile_for(
    target: Target, capability: int, models: list[str], args: argparse.Namespace
) -> dict[str, list[Compiled]]:
    """Compile the kernels of each model and return the results."""
    with noted(target, capability) as launches:
        for name in models:
            launches.model = name
            for dtype in args.dtypes.split(","):
                launches.fresh = chosen(args.kernels, args.sample)
                for part in PARTS if not args.parts else map(globals().__getitem__, args.parts.split(",")):
                    part(MODELS[name], dtype_of(dtype, target), target)
    forbidden = args.forbid.split(",") if args.forbid else []
    with ThreadPoolExecutor(args.threads) as pool:
        compiled = pool.map(
            partial(compile_one, forbidden=forbidden, most=args.most, loops=args.loops),
            launches.kernels.items(),
        )
        done = dict(zip(launches.kernels, compiled, strict=True))
    return {name: [done[kernel] for kernel in launches.by_model.get(name, ())] for name in models}


def faults(target: Target, done: dict[str, list[Compiled]]) -> Iterator[str]:
    for model, kernels in done.items():
        for kernel in kernels:
            if kernel.error:
                yield f"{target}: {model}: {kernel.name}: {kernel.error}"
            elif kernel.shared_bytes > target.shared_bytes:
                taken = f"{kernel.shared_bytes} of {target.shared_bytes} bytes of shared memory"
                yield f"{target}: {model}: {kernel.name} takes {taken}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="half,float32", help="half, float32 or both")
    parser.add_argument("--kernels", default="")
    parser.add_argument("--parts", default="", help="functions of PARTS; empty: all")
    parser.add_argument("--tiles-of", type=int, help="use the tile sizes of this target")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--binary", action="store_true")
    parser.add_argument("--forbid", default="")
    parser.add_argument("--most", default="")
    parser.add_argument("--loops", default="")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    knobs.runtime.add_stages_inspection_hook = (
        None if args.binary or args.forbid or args.most or args.loops else stop_at_assembler
    )
    wrong: list[str] = []
    models = args.models.split(",")
    print("| GPU | limit | kernels | " + " | ".join(models) + " |")
    print("|---" * (3 + len(models)) + "|")
    for capability in map(int, args.targets.split(",")):
        target = TARGETS[capability]
        done = compile_for(TARGETS[args.tiles_of or capability], capability, models, args)
        cells = []
        for kernels in done.values():
            most = max(kernels, key=lambda kernel: kernel.shared_bytes, default=Compiled("none"))
            cells.append(f"{most.shared_bytes} `{most.name}`")
        count = len({id(kernel) for kernels in done.values() for kernel in kernels})
        row = [f"sm{capability} ({target.name})", str(target.shared_bytes), str(count), *cells]
        print("| " + " | ".join(row) + " |", flush=True)
        wrong += faults(target, done)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
