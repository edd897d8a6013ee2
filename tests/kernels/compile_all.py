# ruff: noqa: E402  (imports that must follow a patch)
"""Compiles every kernel for Hopper, as the wrappers would launch it, without a GPU: run by test_compile.py.

A driver that only names the target stands in for the device, and a launch compiles without running.
"""

from __future__ import annotations

from typing import Any

import torch
from hopper import Hopper
from triton.runtime import driver, jit

import quire.kernels

driver.set_active(Hopper())
launch = jit.JITFunction.run
compiled: set[str] = set()


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled.add(self.__name__)
    return launch(self, *args, grid=grid, warmup=True, **options)


jit.JITFunction.run = compile_only
quire.kernels.dependent_launch = lambda device: True  # before the modules take it over

from quire.kernels import (
    activation,
    attend_long,
    attend_shared,
    attend_short,
    batch,
    gemv,
    kv_write,
    norm,
    rope,
    sampling,
    skinny,
)
from quire.kernels.row import COLUMNS


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int64)


def attention(heads: int, kv_heads: int, dim: int, cap: float | None) -> None:
    rows = 64
    q, keys, values = zeros(rows, heads, dim), zeros(9, kv_heads, 16, dim), zeros(9, kv_heads, 16, dim)
    table, out, lens, starts = ints(rows, 8), zeros(rows, heads * dim), ints(rows), ints(rows + 1)
    slots = longs(rows)
    begun = attend_shared.attend_shared(q, keys, values, ints(rows, 4)[:, 3], table, slots, 0.1, cap)
    for splits, state in ((1, None), (1, begun), (8, None)):
        attend_short.attend_short(
            q, keys, values, out, lens, None, table, slots, 0.1, None, cap, 1, splits, state
        )
    attend_short.attend_short(q, keys, values, out, lens, starts, table, slots, 0.1, 77, cap, 4, 2)
    tiles = attend_long.list_tiles(
        starts, lens, slots, 9, 4, attend_long.long_tokens(dim, 2, heads // kv_heads), kv_heads
    )
    attend_long.attend_long(q, keys, values, out, table, tiles, 0.1, None, cap)
    qkv, weight = zeros(rows, (heads + 2 * kv_heads) * dim), zeros(heads + kv_heads, dim)
    rope.norm_rotate_store(qkv, longs(rows), zeros(100, dim), weight, 1e-6, keys, values, longs(rows))
    kv_write.write_kv(q[:, :kv_heads], q[:, :kv_heads], keys, values, longs(rows))


def step() -> None:
    header, tokens, column, table, turn = (
        ints(1025, 4),
        ints(1025, 4096),
        ints(1025),
        ints(1025, 256),
        ints(1),
    )
    for ones, places in ((True, 256), (False, 512)):
        batch.prepare(
            header, 256, places, ones, tokens, column, table, 16, turn, 3, longs(512), longs(512), longs(512),
            ints(257), ints(256), longs(256), longs(256),
        )  # fmt: skip
    batch.advance(header, 256, ints(256), tokens, column, column, turn, ints(3, 1024), 1024, True)
    slots, parameters = longs(256), longs(257, len(COLUMNS))
    for vocab in (151936, 1):  # a launch argument of 1 is a constant to the compiler
        scratch = sampling.Scratch.empty(257, vocab, torch.device("cpu"))
        sampling.choose(zeros(256, vocab), slots, parameters, ints(257), scratch, ints(256), True)


def layers() -> None:
    x = zeros(7, 1024)
    norm.add_rms_norm(x, x, x[0], 1e-6)
    norm.add_layer_norm(x, x, x[0], x[0], 1e-6)
    for name in ("silu", "gelu_tanh"):
        activation.gated(x, name)


def few_rows() -> None:
    up, down, gain = zeros(6144, 1024), zeros(1024, 3072), zeros(1024)
    for rows in (1, 2):
        x, h = zeros(rows, 1024), zeros(rows, 3072)
        gemv.norm_gemv(x, None, gain, 1e-6, up, None, None)
        gemv.norm_gemv(x, x, gain, 1e-6, up, up[:, 0].contiguous(), "silu")
        gemv.gemv(h, down, None, x)
    gemv.gemv(zeros(1, 14336), zeros(64, 14336), None, zeros(1, 64))
    for rows in (8, 16):
        skinny.whole(zeros(rows, 3072), down, gain)
        for outputs, inputs in ((1024, 3072), (64 * 300, 1040)):
            skinny.skinny(zeros(rows, inputs), zeros(outputs, inputs), None, ints(outputs // 64))


attention(16, 8, 128, None)
few_rows()
step()
layers()
print(" ".join(sorted(compiled)))
