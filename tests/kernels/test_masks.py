"""The kernel for grammar masks against its reference in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels.sampling.masks import apply_masks
from quire.sampling import masks as plain

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_torch(vocab: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator).to(dtype)
    rows = torch.tensor([6, 0, 3])
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).to(torch.int32)
    expected = logits.float()
    plain.apply_masks(expected, rows, bits)
    got = logits.to(device)
    apply_masks(got, rows.to(device), bits.to(device))
    assert torch.equal(got.float().cpu(), expected)
    assert torch.equal(got[1].cpu(), logits[1])
