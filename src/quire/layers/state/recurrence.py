"""Linear attention with decay, and the gated delta rule, over ragged batches in plain PyTorch.

Each head keeps a matrix S [key dim, value dim]. For each token, with log decay g (per head, or per channel of the key):

    S = exp(g) S
    w = v                               linear attention: Mamba-2's state space, lightning attention
    w = beta (v - S^T k)                delta rule: Gated DeltaNet, Kimi delta attention
    S = S + k w^T,  o = S^T q

One token of one head costs 4 (linear) or 6 (delta) * key dim * value dim operations, and reads and writes S: 8 bytes
per number in fp32. Chunks of `CHUNK` tokens are matrix products instead (the WY form of arXiv:2406.06484). With G the
sums of g within the chunk, and S the state before it:

    (I + tril(beta k k^T exp(G_i - G_j), -1)) w = beta (v - (k exp(G)) S)
    o = (q exp(G)) S + tril(q k^T exp(G_i - G_j)) w
    S = exp(G_last) S + (k exp(G_last - G))^T w

All exponents are at most 0, so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.kernels.state.rows import StateRows

CHUNK = 64
CHANNEL_CHUNK = (
    16  # with a decay per channel, whose pairwise form has key dim numbers for each pair of tokens
)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    scale: float = 1.0,
    unit: bool = False,
) -> torch.Tensor:
    """Advance the state of each row by its tokens, and return what each token reads. Waits for the device.

    Args:
        q, k: [tokens, key heads, key dim]; each key head serves value heads / key heads consecutive value heads.
        v: [tokens, value heads, value dim].
        gate: float32 [tokens, value heads] or [tokens, value heads, key dim], log decay, at most 0.
        beta: float32 [tokens, value heads] for the delta rule; None for linear attention.
        state: float32 [states, value heads, key dim, value dim].
        rows: the rows and their states.
        scale: factor of q.
        unit: scale q and k to length 1 first.

    Returns:
        [tokens, value heads, value dim], in the dtype of v.
    """
    heads = v.shape[1]
    q, k = (_spread(unit_length(x.float()) if unit else x.float(), heads) for x in (q, k))
    q, values = q * scale, v.float()
    out = torch.zeros_like(values)
    for index, first, end, fresh in rows.spans():
        part = slice(first, end)
        args = q[part], k[part], values[part], gate[part], None if beta is None else beta[part]
        matrix = state[index]
        if rows.targets is not None:
            out[part] = _each(
                args, torch.zeros_like(matrix) if fresh else matrix, state, rows.targets[part].tolist()
            )
            continue
        if fresh:
            matrix.zero_()
        out[part] = _token(*args, matrix) if end - first == 1 else _chunks(*args, matrix)
    return out.to(v.dtype)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each of the key heads for its value heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _each(args: Inputs, matrix: torch.Tensor, state: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """Advance a copy of `matrix` token by token, and store the states that have a target."""
    matrix, out = matrix.clone(), []
    for token, target in enumerate(targets):
        q, k, v, gate, beta = (None if x is None else x[token : token + 1] for x in args)
        assert q is not None and k is not None and v is not None and gate is not None
        out.append(_token(q, k, v, gate, beta, matrix))
        if target >= 0:
            state[target] = matrix
    return torch.cat(out)


def _token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    matrix: torch.Tensor,
) -> torch.Tensor:
    """Advance `matrix` [heads, key dim, value dim] by one token, reading it twice and writing it twice."""
    decay = gate[0].exp()
    decay = decay[:, None] if decay.dim() == 1 else decay  # [heads, 1 or key dim]
    pair = torch.stack((q[0] * decay, k[0] * decay), 1) @ matrix  # [heads, 2, value dim]
    new = v[0] if beta is None else (v[0] - pair[:, 1]) * beta[0, :, None]
    matrix.mul_(decay[:, :, None]).baddbmm_(k[0, :, :, None], new[:, None])
    return (pair[:, 0] + (q[0] * k[0]).sum(-1, keepdim=True) * new)[None]


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    matrix: torch.Tensor,
) -> torch.Tensor:
    """Advance `matrix` chunk by chunk."""
    size = CHUNK if gate.dim() == 2 else CHANNEL_CHUNK
    out = []
    for first in range(0, q.shape[0], size):
        part = slice(first, first + size)
        heads = (x[part].transpose(0, 1) for x in (q, k, v, gate))  # [heads, tokens, ...]
        out.append(_chunk(heads, None if beta is None else beta[part].t()[..., None], matrix))
    return torch.cat(out)


def _chunk(inputs: Iterable[torch.Tensor], beta: torch.Tensor | None, matrix: torch.Tensor) -> torch.Tensor:
    """Advance `matrix` by one chunk of q, k, v and gate, [heads, tokens, ...] each.

    Returns:
        [tokens, heads, value dim].
    """
    q, k, v, gate = inputs
    sums = gate.cumsum(1)
    if gate.dim() == 2:
        sums = sums[..., None]
    inner = _decayed_product(q, k, sums)
    grown = sums.exp()
    new = v
    if beta is not None:
        system = (_decayed_product(k, k, sums) * beta).tril_(-1)
        new = torch.linalg.solve_triangular(
            system, (v - (k * grown) @ matrix) * beta, upper=False, unitriangular=True
        )
    out = ((q * grown) @ matrix).baddbmm_(inner, new)
    last = sums[:, -1:]
    matrix.mul_(last.transpose(1, 2).exp()).baddbmm_((k * (last - sums).exp()).transpose(1, 2), new)
    return out.transpose(0, 1)


def _decayed_product(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return sum over the key dim of a_i b_j exp(G_i - G_j) for j <= i, else 0: [heads, tokens, tokens]."""
    tokens = a.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=a.device).triu_(1)
    difference = sums[:, :, None] - sums[:, None]  # [heads, tokens, tokens, 1 or key dim]
    decay = difference.masked_fill_(later[:, :, None], float("-inf")).exp_()
    if decay.shape[-1] == 1:
        return (a @ b.transpose(1, 2)).mul_(decay[..., 0])
    return torch.einsum("hik,hjk,hijk->hij", a, b, decay)
