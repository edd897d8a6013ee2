"""Conversions around the KV cache: every code that PTX converts, in every place, and queries of any size."""

from __future__ import annotations

import numpy as np
import ptx
import pytest
import torch

from quire.config import triton_interpreted

pytest.importorskip("triton")

import triton
import triton.language as tl

from quire.kernels.attention import codes as kv_codes
from quire.kernels.attention.codes import fp16_queries
from quire.kernels.matmul import codes as weight_codes

# Four bytes of a word that differ from each other, and take every value.
BYTES = (np.arange(256)[:, None] * np.array([1, 3, 5, 7]) + np.array([0, 11, 77, 200])).astype(np.uint8)
WORDS = BYTES.view(np.uint32).reshape(-1)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of BYTES, [256, 4]."""
    return torch.from_numpy(BYTES.copy()).view(dtype).float()


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare finite numbers; values and weights are never NaN, so their programs need not keep it."""
    finite = want.isfinite()
    assert torch.equal(got.float()[finite], want[finite])


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(kv_codes.E4M3_PAIRS, torch.float8_e4m3fn), (kv_codes.INT8_PAIRS, torch.int8)],
    ids=["fp8", "int8"],
)
def test_pairs_of_two_tokens_become_even_and_odd_numbers(program: object, dtype: torch.dtype) -> None:
    even, odd = (ptx.halves(word, torch.bfloat16) for word in ptx.run(program.value, [WORDS], 2))  # type: ignore[attr-defined]
    assert_same(even, numbers(dtype)[:, 0::2])
    assert_same(odd, numbers(dtype)[:, 1::2])


@pytest.mark.parametrize(
    ("program", "dtype", "to"),
    [
        (kv_codes.INT8_FP16, torch.int8, torch.float16),
        (weight_codes.FP8_ASM, torch.float8_e4m3fn, torch.bfloat16),
    ],
    ids=["int8", "fp8"],
)
def test_neighbours_stay_neighbours(program: object, dtype: torch.dtype, to: torch.dtype) -> None:
    first, second = (ptx.halves(word, to) for word in ptx.run(program.value, [WORDS], 2))  # type: ignore[attr-defined]
    assert_same(torch.cat((first, second), 1), numbers(dtype))


@triton.jit
def _convert_queries(q, halves, factors, ROWS: tl.constexpr, DIM: tl.constexpr):
    rows = tl.arange(0, ROWS)
    at = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    half, factor = fp16_queries(tl.load(q + at), 0.125, True)
    tl.store(halves + at, half)
    tl.store(factors + rows, factor)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_queries_in_bf16_become_fp16(device: str) -> None:
    if device == "cpu" and not triton_interpreted():
        pytest.skip("needs Triton's interpreter")
    torch.manual_seed(0)
    q = (torch.randn(16, 32) * torch.logspace(-17, 6, 16)[:, None]).bfloat16()
    q[3] = 0
    q[4, 5] = float("inf")
    q = q.to(device)
    halves = torch.empty(16, 32, dtype=torch.float16, device=device)
    factors = torch.empty(16, device=device)
    _convert_queries[(1,)](q, halves, factors, ROWS=16, DIM=32)
    finite = torch.arange(16, device=device) != 4
    assert not halves[4].isfinite().all()
    assert (halves[finite].abs() < 4).all() and factors[3] == 0.125 * 2.0**-60
    error = (halves.double() * factors.double()[:, None] / 0.125 - q.double()).abs()
    assert (error[finite] <= q[finite].double().abs().amax(1, keepdim=True) * 2**-25).all()
