"""Layers with states: plain PyTorch against transformers and token by token, kernels against plain PyTorch.

Rows are ragged, some are empty, some begin here, and the batch is padded. Rows that begin hold NaN before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.state.rows import StateRows
from quire.layers.state.conv import causal_conv
from quire.layers.state.recurrence import recurrence
from quire.layers.state.selective_scan import selective_scan

pytest.importorskip("triton")
from quire.kernels.state import conv
from quire.kernels.state import recurrence as recur
from quire.kernels.state import selective_scan as scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = [3, 0, 1, 6, 0]
HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 6, 10


def make_rows(targets: bool = False) -> StateRows:
    """Return rows of which the second to last is padding, with two tokens behind it."""
    starts = torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = sum(COUNTS) + 2
    at = torch.tensor([-1, 6, 0, 1, -1, 4, 7, 5, 2, 3, -1, -1])[:tokens]
    fresh = torch.tensor([True, True, False, False, False])
    moved = [x.to(DEVICE) for x in (torch.tensor([0, 2, 1, 3, 8]), starts, fresh)]
    return StateRows(*moved, targets=at.to(DEVICE) if targets else None)


def make_states(*shape: int) -> torch.Tensor:
    states = torch.randn(9, *shape, device=DEVICE)
    states[0] = float("nan")  # the first row begins here
    return states


def compare(plain: Any, kernel: Any, state: torch.Tensor, rows: StateRows) -> None:
    """Check results and states; `plain` and `kernel` take the state."""
    first, second = state.clone(), state.clone()
    want, got = plain(first)[: sum(COUNTS)], kernel(second)[: sum(COUNTS)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    used = [0, 1, 3] if rows.targets is None else [index for index in rows.targets.tolist() if index >= 0]
    torch.testing.assert_close(second[used], first[used], rtol=1e-4, atol=1e-4)
    assert want.isfinite().all() and not torch.equal(first[used], state[used])


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize(("width", "bias", "activation"), [(4, True, "silu"), (3, False, None)])
def test_convolution(width: int, bias: bool, activation: str | None, targets: bool) -> None:
    torch.manual_seed(0)
    rows, channels = make_rows(targets), 5
    x = torch.randn(sum(COUNTS) + 2, 2 * channels, device=DEVICE)[:, :channels]
    weight, offset = torch.randn(width, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
    args = x, weight, offset if bias else None
    compare(
        lambda state: causal_conv(*args, state, rows, activation),
        lambda state: conv.causal_conv(*args, state, rows, activation),
        make_states(width - 1, channels),
        rows,
    )


def test_convolution_of_one_token_each() -> None:
    """Rows of one token take fewer operations, and give what the same tokens give in a batch of other rows."""
    torch.manual_seed(0)
    x, weight, window = torch.randn(3, 5), torch.randn(4, 5), make_states(3, 5).cpu()
    starts, fresh = torch.arange(4, dtype=torch.int32), torch.tensor([True, False, False])
    outs, windows = [], []
    for counts in (None, np.ones(3, np.int32)):
        windows.append(window.clone())
        rows = StateRows(torch.tensor([0, 4, 2]), starts, fresh, counts)
        outs.append(causal_conv(x, weight, None, windows[-1], rows, "silu"))
    torch.testing.assert_close(outs[0], outs[1])
    assert torch.equal(windows[0][[0, 2, 4]], windows[1][[0, 2, 4]]) and outs[0].isfinite().all()
    uneven = torch.tensor([0, 2, 2, 3], dtype=torch.int32)  # as many tokens as rows
    outs = [
        causal_conv(x, weight, None, window.clone(), StateRows(rows.index, uneven, fresh, counts), "silu")
        for counts in (None, np.array([2, 0, 1], np.int32))
    ]
    torch.testing.assert_close(outs[0], outs[1])


def inputs(channel_gate: bool, delta: bool, tokens: int = sum(COUNTS) + 2) -> tuple[torch.Tensor | None, ...]:
    torch.manual_seed(1)
    q, k = (torch.randn(tokens, KEY_HEADS, KEY, device=DEVICE) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE, device=DEVICE)
    gate = -2 * torch.rand((tokens, HEADS, KEY) if channel_gate else (tokens, HEADS), device=DEVICE)
    return q, k, v, gate, torch.rand(tokens, HEADS, device=DEVICE) if delta else None


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize(("channel_gate", "delta"), [(False, False), (False, True), (True, True)])
def test_recurrence(channel_gate: bool, delta: bool, targets: bool) -> None:
    args, rows = inputs(channel_gate, delta), make_rows(targets)
    compare(
        lambda state: recurrence(*args, state, rows, 0.4, delta),  # type: ignore[arg-type]
        lambda state: recur.recurrence(*args, state, rows, 0.4, delta),  # type: ignore[arg-type]
        make_states(HEADS, KEY, VALUE),
        rows,
    )


@pytest.mark.parametrize("delta", [False, True])
def test_prompts_in_chunks(delta: bool) -> None:
    """Rows of several chunks, one with repeated keys, beside a row of one token."""
    q, k, v, gate, beta = inputs(False, delta, 75)
    assert q is not None and k is not None and v is not None and gate is not None
    k[40:60] = k[40]
    starts = torch.tensor([0, 17, 18, 71], dtype=torch.int32, device=DEVICE)
    fresh = torch.tensor([True, False, False], device=DEVICE)
    rows = StateRows(torch.tensor([0, 4, 2], device=DEVICE), starts, fresh)
    state = make_states(HEADS, KEY, VALUE)
    first, second = state.clone(), state.clone()
    want = recurrence(q, k, v, gate, beta, first, rows, 0.4, delta)[:71]
    got = recur.recurrence(q, k, v, gate, beta, second, rows, 0.4, delta)[:71]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[[0, 2, 4]], first[[0, 2, 4]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", [False, True])
def test_selective_scan(targets: bool) -> None:
    torch.manual_seed(2)
    rows, tokens, channels, depth = make_rows(targets), sum(COUNTS) + 2, 7, 5
    x, step = torch.randn(tokens, channels, device=DEVICE), torch.rand(tokens, channels, device=DEVICE)
    a, d = -torch.rand(channels, depth, device=DEVICE), torch.randn(channels, device=DEVICE)
    b, c = (torch.randn(tokens, depth, device=DEVICE) for _ in range(2))
    compare(
        lambda state: selective_scan(x, step, a, b, c, d, state, rows),
        lambda state: scan.selective_scan(x, step, a, b, c, d, state, rows),
        make_states(channels, depth),
        rows,
    )


@pytest.mark.parametrize("cuts", [[150], [1, 1, 63, 64, 0, 21], [70, 80]])
@pytest.mark.parametrize(("channel_gate", "delta"), [(False, False), (False, True), (True, True)])
def test_chunks_follow_one_another(channel_gate: bool, delta: bool, cuts: list[int]) -> None:
    """A prompt in chunks of any sizes gives what the definition gives token by token, in fp64."""
    args, at = inputs(channel_gate, delta, 150), 0
    state, outs = torch.full((2, HEADS, KEY, VALUE), float("nan"), device=DEVICE), []
    for count in cuts:
        part = (None if x is None else x[at : at + count] for x in args)
        starts = torch.tensor([0, count], dtype=torch.int32)
        rows = StateRows(torch.tensor([1]), starts, torch.tensor([at == 0]))
        outs.append(recurrence(*part, state, rows))  # type: ignore[arg-type]
        at += count
    want, last = token_by_token(*args)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(outs).double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[1].double(), last, rtol=1e-4, atol=1e-4)


def token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the definition in fp64, and return the results and the last state."""
    q, k = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    matrix, outs = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64, device=q.device), []
    for t in range(len(q)):
        decay = gate[t].double().exp()
        matrix = matrix * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        new = v[t].double()
        if beta is not None:
            new = beta[t].double()[:, None] * (new - torch.einsum("hkv,hk->hv", matrix, k[t]))
        matrix = matrix + torch.einsum("hk,hv->hkv", k[t], new)
        outs.append(torch.einsum("hkv,hk->hv", matrix, q[t]))
    return torch.stack(outs), matrix


def test_gated_delta_rule_matches_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, gate, beta = (x for x in inputs(False, True, 70))
    want, last = modeling.torch_chunk_gated_delta_rule(
        q[None], k[None], v[None], g=gate[None], beta=beta[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state = torch.zeros(1, HEADS, KEY, VALUE, device=DEVICE)
    starts = torch.tensor([0, 70], dtype=torch.int32)
    rows = StateRows(torch.tensor([0]), starts, torch.tensor([True]))
    got = recurrence(q, k, v, gate, beta, state, rows, KEY**-0.5, True)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
