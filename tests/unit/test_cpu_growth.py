"""Bounds of host memory on a CPU: code that libraries generate for each new shape and keep, masks, tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from packing import need_packed
from quire.attention import gathered, reference
from quire.attention.reference import ReferenceAttention
from quire.layers import rope
from quire.layers.rope import Rope
from quire.layers.rope_params import RopeParams
from quire.quant.base import PlainMatmul
from quire.quant.packed import PackedMatmul, pack, padded_rows
from ragged import Layer, check, make_case


def test_numbers_of_rows_that_a_product_is_asked_for_are_few() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 2049)}
    assert len(sizes) <= 80 and max(sizes) == 2048
    assert all(rows <= padded_rows(rows) < max(rows + 16, 1.1 * rows) for rows in range(9, 2049))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_not_seen(dtype: torch.dtype) -> None:
    need_packed(dtype)
    weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
    matmul, asked = PackedMatmul(weight, bias), set[int]()
    multiply = matmul.multiply

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.add(x.shape[0])
        return multiply(x, *rest)

    matmul.multiply = noted  # type: ignore[method-assign]
    for rows in (1, 9, 16, 17, 31, 100, 129, 700):
        x = torch.randn(rows, 24).to(dtype)
        y = matmul(x)
        assert y.shape == (rows, 40) and y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=2e-2, atol=5e-2)
    assert asked == {1, 16, 32, 112, 144, 704}


def test_shapes_of_attention_in_16_bits_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, attend = set[tuple[int, int]](), F.scaled_dot_product_attention

    def noted(q: torch.Tensor, k: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if q.shape[2] > 32:
            shapes.add((q.shape[2] % 64, k.shape[2] % 512))  # remainders of the tiles that PyTorch uses
        return attend(q, k, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    backend, rng = ReferenceAttention(), random.Random(0)
    for index in range(60):
        layer = Layer(4, 2, 16, 0.25, window=rng.choice([None, 40]))
        rows = [(rng.choice([0, rng.randrange(600)]), rng.choice([1, rng.randint(1, 200)])) for _ in range(3)]
        case = make_case(random.Random(index), backend, layer, rows, 16, dtype=torch.bfloat16)
        check(case, backend)
    assert len(shapes) <= 8 * 8
    assert {keys % 64 for _, keys in shapes} <= {0, 16, 32, 48}


def test_prompts_without_a_past_have_few_shapes() -> None:
    """Steps of 16 up to 256 tokens, of 64 beyond: 14 shapes, and then 8 remainders of a tile of 512 keys."""
    sizes = set[int]()
    for tokens in range(33, 2049):
        q, kv = (torch.empty(1, heads, tokens, 1, dtype=torch.bfloat16) for heads in (2, 1))
        padded_q, padded_k, _, mask = gathered.pad_shapes(q, kv, kv, None, causal=True)
        assert padded_q.shape[2] == padded_k.shape[2] and mask is None
        sizes.add(padded_k.shape[2])
        assert tokens <= padded_k.shape[2] < tokens + (16 if tokens <= 256 else 64)
    assert len({size for size in sizes if size <= 256}) == 14
    assert len({size % 512 for size in sizes if size > 256}) == 8


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7, 100])
def test_masks_are_made_in_bounded_pieces(
    window: int | None, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows give the same result in pieces as in one."""
    monkeypatch.setattr(reference, "_MASK_ELEMENTS", 2000)
    made: list[tuple[int, torch.dtype]] = []
    cut = reference.LongRow.cut

    def noted(self: reference.LongRow, *args: Any) -> Any:
        for piece in cut(self, *args):
            assert piece.mask is not None
            made.append((piece.mask.numel(), piece.mask.dtype))
            yield piece

    monkeypatch.setattr(reference.LongRow, "cut", noted)
    backend, layer = ReferenceAttention(), Layer(4, 2, 16, 0.25, window=window, soft_cap=soft_cap)
    rows = [(150, 60), (0, 90), (33, 2), (70, 1)]
    case = make_case(random.Random(1), backend, layer, rows, 16)
    check(case, backend)
    assert len(made) >= 8 and all(size <= 2000 and dtype == torch.bool for size, dtype in made)


def test_masks_that_are_small_are_made_once_for_all_layers() -> None:
    backend, layer = ReferenceAttention(), Layer(4, 2, 16, 0.25)
    case = make_case(random.Random(1), backend, layer, [(50, 20)], 16)
    (long,) = case.batch.attn.long_rows
    first, second = (list(long.pieces(layer)) for _ in range(2))
    assert first[0].mask is second[0].mask is not None


def test_angles_computed_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params, device = RopeParams(theta=10000.0), torch.device("cpu")
    whole = Rope(params, 32, 1000, device, torch.float32).table
    monkeypatch.setattr(rope, "_POSITIONS", 7)
    assert torch.equal(Rope(params, 32, 1000, device, torch.float32).table, whole)


def test_a_cpu_without_products_of_bf16_multiplies_them_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN raises an error when it packs such a weight without AVX-512."""
    weight = torch.randn(40, 24).bfloat16()
    monkeypatch.setattr("quire.quant.packed.can_pack", lambda dtype: dtype != torch.bfloat16)
    matmul, x = pack(weight, None, None), torch.randn(3, 24).bfloat16()
    assert isinstance(matmul, PlainMatmul)
    torch.testing.assert_close(matmul(x), F.linear(x, weight))
