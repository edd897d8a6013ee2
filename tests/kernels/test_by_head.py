"""The products of heads against torch's batched product, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels.matmul.by_head import MOST_TOKENS, product_by_head, takes_heads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("tokens", [1, MOST_TOKENS])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 40), (512, 24)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_heads(tokens: int, inputs: int, outputs: int, transposed: bool) -> None:
    """Inputs, matrices and results are parts of larger tensors, as in absorbed attention."""
    make = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, 3, inputs + 5, device=DEVICE, generator=make)[..., :inputs]
    shape = (3, outputs + 7, inputs) if transposed else (3, inputs, outputs + 7)
    weight = torch.randn(shape, device=DEVICE, generator=make) / inputs**0.5
    weight = (weight.transpose(1, 2) if transposed else weight)[..., :outputs]
    y = torch.full((tokens, 3, outputs + 2), 7.0, device=DEVICE)
    assert takes_heads(x, weight)
    product_by_head(x, weight, y[..., :outputs])
    torch.testing.assert_close(
        y[..., :outputs], torch.einsum("thi,hio->tho", x, weight), rtol=1e-5, atol=1e-5
    )
    assert (y[..., outputs:] == 7.0).all()
    assert not takes_heads(x.new_empty(MOST_TOKENS + 1, 3, inputs), weight)
