"""Causal depthwise convolution over the last few tokens of each row, in plain PyTorch.

For token t of a row and channel c: y[t, c] = act(bias[c] + sum over j of weight[j, c] * x[t - (width - 1) + j, c]),
where tokens before the row's first come from its window. Operations: 2 * width * tokens * channels. Bytes: x and y
once, and the windows of all rows once each way.
"""

from __future__ import annotations

import torch

from quire.kernels.state.rows import StateRows
from quire.layers.activation import ACTIVATIONS


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    rows: StateRows,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve each row, and replace its window by its last inputs. Waits for the device if rows have targets.

    Args:
        x: [tokens, channels].
        weight: float32 [width, channels]; the last tap is that of the token itself.
        bias: float32 [channels], or None.
        window: [states, width - 1, channels], the inputs before each row's first token, oldest first.
        rows: the rows and their windows.
        activation: key of `ACTIVATIONS`, or None.

    Returns:
        [tokens, channels].
    """
    tokens, taps = x.shape[0], weight.shape[0]
    owner = rows.owners(tokens)
    offset = torch.arange(tokens, device=x.device) - rows.starts[owner]
    before = torch.where(rows.fresh[:, None, None], 0, window[rows.index])  # [rows, width - 1, channels]
    total = x.float() * weight[-1]
    for back in range(1, taps):
        shifted = torch.cat((x[:back] * 0, x[:-back]))[:tokens]
        older = before[owner, (taps - 1 + offset - back).clamp(0, taps - 2)]
        total += torch.where((offset >= back)[:, None], shifted, older).float() * weight[taps - 1 - back]
    if bias is not None:
        total += bias
    _store(x, before, window, rows, owner, offset)
    if activation is not None:
        total = ACTIVATIONS[activation](total)
    return total.to(x.dtype)


def _store(
    x: torch.Tensor,
    before: torch.Tensor,
    window: torch.Tensor,
    rows: StateRows,
    owner: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Write the windows after each row, or after each token that has a target."""
    kept = window.shape[1]
    if rows.targets is None:
        lengths, row = rows.starts[1:] - rows.starts[:-1], torch.arange(len(rows.index), device=x.device)
        first, to = rows.starts[:-1], rows.index
    else:
        lengths, row, first = offset + 1, owner, rows.starts[owner]
        to = rows.targets
    # Position in the row of each input that is kept; negative ones are those of the old window.
    position = lengths[:, None] - kept + torch.arange(kept, device=x.device)
    old = before[row[:, None], (position + kept).clamp(max=kept - 1)]
    new = x[(first[:, None] + position).clamp(0, max(x.shape[0] - 1, 0))]
    updated = torch.where((position >= 0)[:, :, None], new, old)
    if rows.targets is not None:
        to, updated = to[to >= 0], updated[to >= 0]
    window[to] = updated
