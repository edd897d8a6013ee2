"""The selective scan of Mamba-1 (arXiv:2312.00752) over ragged batches in plain PyTorch.

Each channel keeps a vector h [state dim]. For each token: h = exp(dt A) h + dt x B, y = C . h + D x. One token of one
channel costs about 7 * state dim operations, one of them an exponential, and reads and writes h.
"""

from __future__ import annotations

import torch

from quire.kernels.state.rows import StateRows


def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Advance the state of each row by its tokens, and return what each token reads. Waits for the device.

    Args:
        x: [tokens, channels].
        step: float32 [tokens, channels], the time steps dt.
        a: float32 [channels, state dim], negative.
        b, c: [tokens, state dim].
        d: float32 [channels].
        state: float32 [states, channels, state dim].
        rows: the rows and their states.

    Returns:
        [tokens, channels], in the dtype of x.
    """
    values, b, c = x.float(), b.float(), c.float()
    out = values * d
    scaled = values * step
    for index, first, end, fresh in rows.spans():
        vector = state[index] if rows.targets is None else state[index].clone()
        if fresh:
            vector.zero_()
        for token in range(first, end):
            vector.mul_((step[token, :, None] * a).exp_()).addr_(scaled[token], b[token])
            out[token] += vector @ c[token]
            if rows.targets is not None and (target := int(rows.targets[token])) >= 0:
                state[target] = vector
    return out.to(x.dtype)
