"""Products of each head's vector with the head's own matrix, for a few tokens: the two ends of absorbed attention.

A program multiplies the vectors of one head with a part of its matrix, which it loads before the kernel in front has
ended. Matrices are read once, in bf16 or fp16; sums are in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.target import target_of

MOST_TOKENS = 4  # with more, the library's batched product is as fast
_NUMBERS = 8192  # of a program's part of the matrix


@kernel
def _by_head(
    x,  # [TOKENS, heads, INPUTS], strides x_token and x_head
    weight,  # [heads, INPUTS, outputs], strides w_head, w_input and w_output
    y,  # [TOKENS, heads, outputs], strides y_token and y_head
    outputs,
    x_token,
    x_head,
    w_head,
    w_input,
    w_output,
    y_token,
    y_head,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    INPUTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # outputs of a program
    PDL: tl.constexpr,
) -> None:
    """Grid (heads, tiles of outputs)."""
    head = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, INPUTS_PAD)
    inside = (n < outputs)[:, None] & (k < INPUTS)[None, :]
    w = tl.load(
        weight + head * w_head + n[:, None] * w_output + k[None, :] * w_input, mask=inside, other=0.0
    ).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        value = tl.load(x + token * x_token + head * x_head + k, mask=k < INPUTS, other=0.0).to(tl.float32)
        sums = tl.sum(w * value[None, :], 1)
        tl.store(y + token * y_token + head * y_head + n, sums.to(y.dtype.element_ty), mask=n < outputs)


def takes_heads(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `product_by_head` is faster than the library's product."""
    return 0 < x.shape[0] <= MOST_TOKENS and triton.next_power_of_2(weight.shape[1]) <= _NUMBERS // 8


def product_by_head(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write x[:, h] @ weight[h] to y[:, h], for every head h.

    Args:
        x: [tokens, heads, inputs], at most `MOST_TOKENS` tokens; the last dimension is contiguous.
        weight: [heads, inputs, outputs], of any strides.
        y: [tokens, heads, outputs]; the last dimension is contiguous.
    """
    (tokens, heads, inputs), outputs = x.shape, weight.shape[2]
    assert x.stride(2) == y.stride(2) == 1
    pad = triton.next_power_of_2(inputs)
    block = min(_NUMBERS // pad, triton.next_power_of_2(outputs))
    pdl = target_of(x.device).has_dependent_launch
    _by_head[(heads, triton.cdiv(outputs, block))](
        x, weight, y, outputs, x.stride(0), x.stride(1), *weight.stride(),
        y.stride(0), y.stride(1), TOKENS=tokens, INPUTS=inputs, INPUTS_PAD=pad, BLOCK=block, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
