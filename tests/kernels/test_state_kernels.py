"""Layers with states: plain PyTorch against transformers and token by token, kernels against plain PyTorch.

Rows are ragged, some are empty, some begin here, and the batch is padded. Rows that begin hold NaN before.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.state.rows import StateRows
from quire.layers.state import gates
from quire.layers.state.conv import causal_conv
from quire.layers.state.recurrence import recurrence, unit_length
from quire.layers.state.selective_scan import selective_scan

pytest.importorskip("triton")
from quire.kernels.matmul.round_fp8 import round_fp8
from quire.kernels.state import chunks, conv, delta_step
from quire.kernels.state import gates as kernel_gates
from quire.kernels.state import recurrence as recur
from quire.kernels.state import selective_scan as scan
from quire.layers.mixer_params import DeltaParams
from quire.layers.state.gated_delta import GatedDeltaNet
from quire.layers.state.ops import StateOps

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


@pytest.mark.parametrize("counts", [[150, 0, 47], [3, 16, 29, 64], [13, 100, 0, 0]], ids=str)
@pytest.mark.parametrize(("width", "bias"), [(4, True), (3, False)])
def test_convolution_of_prompts(counts: list[int], width: int, bias: bool) -> None:
    """Strips inside a row, at its beginning and end, over several rows, and behind the last one."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    fresh, index = torch.tensor([True, False, False, False]), torch.tensor([0, 3, 1, 2])
    rows = StateRows(*(x.to(DEVICE) for x in (index[: len(counts)], starts, fresh[: len(counts)])))
    channels, used = 600, sum(counts)
    x = torch.randn(used + 20, channels + 8, device=DEVICE)[:, :channels]
    taps, shift = torch.randn(width, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
    windows = make_states(width - 1, channels)
    found = []
    for convolve in (causal_conv, conv.causal_conv):
        window = windows.clone()
        y = convolve(x, taps, shift if bias else None, window, rows, "silu")
        found.append((y[:used], window[[i for i, count in zip(index.tolist(), counts) if count]]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert found[0][0].isfinite().all()


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


@pytest.mark.parametrize("apart", [False, True], ids=["one-product", "four-products"])
def test_delta_step(apart: bool) -> None:
    """One kernel of rows of one token computes what the operations of a layer compute one by one."""
    torch.manual_seed(2)
    channels, values = 2 * KEY_HEADS * KEY + HEADS * VALUE, HEADS * VALUE
    parts = torch.randn(4, channels + values + 2 * HEADS, device=DEVICE).split(
        [channels, values, HEADS, HEADS], 1
    )
    qkv, z, b, a = (part.contiguous() for part in parts) if apart else parts
    taps, norm = torch.randn(4, channels, device=DEVICE), torch.rand(VALUE, device=DEVICE)
    rate, bias = torch.rand(HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE)
    starts = torch.tensor([0, 1, 2, 2, 3], dtype=torch.int32, device=DEVICE)  # the third row is padding
    fresh = torch.tensor([True, False, True, False], device=DEVICE)
    index = torch.tensor([0, 4, 8, 2], device=DEVICE)
    rows = StateRows(index, starts, fresh, short_only=True)
    windows, states = make_states(3, channels), make_states(HEADS, KEY, VALUE)

    def one_by_one(window: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        mixed = causal_conv(qkv, taps, None, window, rows, "silu")
        q, k, v = mixed.split([KEY_HEADS * KEY, KEY_HEADS * KEY, values], 1)
        q, k = (part.unflatten(1, (KEY_HEADS, KEY)) for part in (q, k))
        decay, beta = gates.delta_gates(a, b, rate, bias)
        v = v.unflatten(1, (HEADS, VALUE))
        read = recurrence(q, k, v, decay, beta, state, rows, KEY**-0.5, True)
        return gates.gated_norm(read, z.unflatten(1, (HEADS, VALUE)), norm, 1e-6).flatten(1)

    step = delta_step.make_delta_step(KEY_HEADS, KEY, HEADS, VALUE, taps, rate, bias, norm, 1e-6)
    assert step is not None and step.takes(rows)
    want_window, want_state, window, state = windows.clone(), states.clone(), windows.clone(), states.clone()
    want, got = one_by_one(want_window, want_state)[:3], step(qkv, z, b, a, window, state, rows)[:3]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert want.isfinite().all() and not step.arrived.any()
    for found, wanted, before in ((window, want_window, windows), (state, want_state, states)):
        torch.testing.assert_close(found[[0, 4, 2]], wanted[[0, 4, 2]], rtol=1e-4, atol=1e-4)
        others = [1, 3, 5, 6, 7]
        assert torch.equal(found[others], before[others]) and not torch.equal(found[4], before[4])
    assert not step.takes(make_rows()) and not step.takes(make_rows(targets=True))
    assert delta_step.make_delta_step(KEY_HEADS, 256, HEADS, 128, taps, rate, bias, norm, 1e-6) is None


LONG = [
    17,
    1,
    64,
    0,
    65,
    127,
]  # rows of one chunk, none, exactly one, one and a token, two that end in the middle
# Triton's interpreter multiplies no bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
LIMITS = {
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 0.03,
}  # of errors, relative to the largest number


def long_rows() -> StateRows:
    starts = torch.tensor([0, *LONG], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    fresh = torch.tensor([True, False, False, False, True, False])
    index = torch.tensor([0, 4, 2, 8, 1, 3])
    return StateRows(index.to(DEVICE), starts.to(DEVICE), fresh.to(DEVICE))


def check_prompts(
    args: tuple[torch.Tensor | None, ...], kind: torch.dtype, shape: tuple[int, int, int], exact: float = 1e-4
) -> None:
    """Compare the kernels with the definition in fp64 on the same rounded inputs, in fp32 to within `exact`."""
    rows = long_rows()
    q, k, v, gate, beta = args
    q, k, v = (x.to(kind) for x in (q, k, v))  # type: ignore[union-attr]
    state = make_states(*shape)
    state[1] = float("nan")  # this row begins here too
    before = state.double()
    got = recur.recurrence(q, k, v, gate, beta, state, rows, 0.4, True)
    limit = max(exact, LIMITS[kind])
    for index, first, end, fresh in rows.spans():
        part = (
            x[first:end].double() for x in (unit_length(q.double()) * 0.4, unit_length(k.double()), v, gate)
        )
        matrix = torch.zeros_like(before[index]) if fresh else before[index]
        want, last = token_by_token(*part, None if beta is None else beta[first:end].double(), matrix)
        for found, wanted in ((got[first:end], want), (state[index], last)):
            error = (found.double() - wanted).abs().max() / wanted.abs().max()
            assert wanted.isfinite().all() and error < limit, (first, end, error)
    assert got.dtype == kind


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(("channel_gate", "delta"), [(False, False), (False, True), (True, True)])
def test_prompts_in_chunks(
    channel_gate: bool, delta: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several chunks, one with repeated keys, beside a row of one token and an empty one.

    In fp32 chunks of 64 tokens take minutes to compile, so a GPU tests them in bfloat16 only.
    """
    kind = HALF if DEVICE == "cuda" and chunk == 64 else torch.float32
    tile = chunks.ChunkTile(chunk, 32, 4, 2)
    monkeypatch.setattr(chunks, "tile_for", lambda *sizes: tile)
    args = inputs(channel_gate, delta, sum(LONG) + 3)
    assert args[1] is not None
    args[1][100:180] = args[1][100]
    check_prompts(args, kind, (HEADS, KEY, VALUE))


def test_a_step_of_prompts_alone_takes_no_kernel_of_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host knows that all rows are long, the kernel of few tokens is not launched, and nothing changes."""
    counts, tokens = np.array([40, 0, 17, 0, 0]), 57
    starts = torch.tensor([0, 40, 40, 57, 57, 57], dtype=torch.int32, device=DEVICE)
    rows = StateRows(torch.tensor([0, 2, 1, 3, 8], device=DEVICE), starts, make_rows().fresh)
    args, state = inputs(False, True, tokens), make_states(HEADS, KEY, VALUE)
    found = []
    for known in (None, counts):
        rows.counts, after = known, state.clone()
        found.append((recur.recurrence(*args, after, rows, 0.4, True), after))  # type: ignore[arg-type]
        if known is None:
            monkeypatch.setattr(recur, "_recur", None)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1][1:], found[1][1][1:])
    rows.counts = np.array([40, 0, 16, 0, 0])
    assert not rows.all_longer(16) and not make_rows().all_longer(0)


@pytest.mark.parametrize("kind", [torch.float32, HALF])
@pytest.mark.parametrize(("channel_gate", "delta"), [(False, False), (False, True), (True, True)])
def test_prompts_with_extreme_decays(channel_gate: bool, delta: bool, kind: torch.dtype) -> None:
    """Tokens that forget everything stand beside tokens that forget nothing, and rates of 1 beside rates of 0."""
    q, k, v, gate, beta = inputs(channel_gate, delta, sum(LONG) + 3)
    assert gate is not None
    chance = torch.rand(gate.shape, device=DEVICE)
    gate[chance < 0.3] = 0.0
    gate[chance > 0.9] = -300.0
    if beta is not None:
        beta.round_()
    # Differences of large sums of decays are rounded.
    check_prompts((q, k, v, gate, beta), kind, (HEADS, KEY, VALUE), exact=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, HALF])
@pytest.mark.parametrize(("channel_gate", "delta"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("key_heads", "heads", "key", "value"), [(2, 4, 128, 128), (1, 4, 128, 80), (2, 2, 64, 64)]
)
def test_prompts_of_true_sizes(
    key_heads: int, heads: int, key: int, value: int, channel_gate: bool, delta: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(3)
    tokens = sum(LONG) + 3
    q, k = (torch.randn(tokens, key_heads, key, device=DEVICE) for _ in range(2))
    v = torch.randn(tokens, heads, value, device=DEVICE)
    gate = -2 * torch.rand((tokens, heads, key) if channel_gate else (tokens, heads), device=DEVICE)
    rate = torch.rand(tokens, heads, device=DEVICE) if delta else None
    check_prompts((q, k, v, gate, rate), kind, (heads, key, value))


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


@pytest.mark.parametrize("channels", [7, pytest.param(5120, marks=pytest.mark.gpu)])
def test_selective_scan_of_prompts(channels: int) -> None:
    """Rows of several chunks, exactly one and none, with the states behind them."""
    torch.manual_seed(6)
    rows, tokens, depth = long_rows(), sum(LONG) + 3, 16
    x, step = torch.randn(tokens, channels, device=DEVICE), torch.rand(tokens, channels, device=DEVICE)
    a, d = -torch.rand(channels, depth, device=DEVICE), torch.randn(channels, device=DEVICE)
    b, c = (torch.randn(tokens, depth, device=DEVICE) for _ in range(2))
    first = make_states(channels, depth)
    first[1] = float("nan")  # this row begins here too
    second = first.clone()
    want = selective_scan(x, step, a, b, c, d, first, rows)[: sum(LONG)]
    got = scan.selective_scan(x, step, a, b, c, d, second, rows)[: sum(LONG)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    used = [index for index, *_ in rows.spans()]
    torch.testing.assert_close(second[used], first[used], rtol=1e-4, atol=1e-4)
    assert want.isfinite().all()


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor | None,
    matrix: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the definition in fp64 from the state `matrix`, and return the results and the last state."""
    heads = v.shape[1]
    q, k = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    if matrix is None:
        matrix = torch.zeros(heads, q.shape[2], v.shape[2], dtype=torch.float64, device=q.device)
    outs = []
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
    spread_q, spread_k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))  # type: ignore[union-attr]
    want, last = modeling.torch_chunk_gated_delta_rule(
        spread_q[None], spread_k[None], v[None], g=gate[None], beta=beta[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state = torch.zeros(1, HEADS, KEY, VALUE, device=DEVICE)
    starts = torch.tensor([0, 70], dtype=torch.int32)
    rows = StateRows(torch.tensor([0]), starts, torch.tensor([True]))
    got = recurrence(q, k, v, gate, beta, state, rows, KEY**-0.5, True)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fresh", [False, True])
def test_convolution_of_decoding_rows(fresh: bool) -> None:
    """Rows of one token each take one kernel; an empty row changes nothing."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    begins = torch.tensor([fresh, False, False, False], device=DEVICE)
    rows = StateRows(torch.tensor([0, 8, 4, 2], device=DEVICE), starts, begins, short_only=True)
    x, weight = torch.randn(4, 300, device=DEVICE)[:, :150], torch.randn(4, 150, device=DEVICE)
    window, bias = torch.randn(9, 3, 150, device=DEVICE), torch.randn(150, device=DEVICE)
    first, second = window.clone(), window.clone()
    want = causal_conv(x, weight, bias, first, rows, "silu")[:3]
    got = conv.causal_conv(x, weight, bias, second, rows, "silu")[:3]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(second[[0, 2, 4]], first[[0, 2, 4]]) and torch.equal(second[8], window[8])


@pytest.mark.parametrize("width", [1, 6])
def test_gates(width: int) -> None:
    torch.manual_seed(4)
    projected = 20 * torch.randn(5, 7 * width + 9, device=DEVICE)
    a, b = projected[:, 2 : 2 + 7 * width], projected[:, 2 + 7 * width :]
    rate, bias = torch.rand(7, device=DEVICE), torch.randn(7 * width, device=DEVICE)
    for got, want in zip(kernel_gates.delta_gates(a, b, rate, bias), gates.delta_gates(a, b, rate, bias)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_gated_norm(tokens: int, activation: str) -> None:
    torch.manual_seed(5)
    x, projected = torch.randn(tokens, 3, 20, device=DEVICE), torch.randn(tokens, 70, device=DEVICE)
    gate, weight = projected[:, 10:].unflatten(1, (3, 20)), torch.randn(20, device=DEVICE)
    got = kernel_gates.gated_norm(x, gate, weight, 1e-6, activation)
    torch.testing.assert_close(got, gates.gated_norm(x, gate, weight, 1e-6, activation), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_norm_that_rounds_changes_no_bit(tokens: int, by_column: bool) -> None:
    """The codes and scales are those of the kernel that rounds the result of the norm."""
    torch.manual_seed(6)
    x, gate = (torch.randn(tokens, 3, 128, device=DEVICE, dtype=HALF) for _ in range(2))
    weight = torch.rand(128, device=DEVICE)
    x[1] = 0
    x[2, 1, 7] = float("inf")
    codes, scales = kernel_gates.rounded_norm(x, gate, weight, 1e-6, by_column)
    normed = kernel_gates.gated_norm(x, gate, weight, 1e-6).flatten(1)
    wanted, wanted_scales, _ = round_fp8(normed, True, by_column=by_column)
    assert torch.equal(codes.flatten(1).view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    assert scales.stride() == wanted_scales.stride() and scales[2, 1].isnan()


def test_a_layer_rounds_what_its_output_projection_rounds() -> None:
    """Unless it is the last layer, whose result is narrowed before the projection."""
    torch.manual_seed(7)
    keys, heads, key, value, tokens = 1, 2, 16, 128, 20
    channels = 2 * keys * key + heads * value
    rows = StateRows(*(torch.tensor(x, device=DEVICE) for x in ([1], [0, tokens], [True])))
    rows.starts = rows.starts.int()
    layer = object.__new__(GatedDeltaNet)
    layer.params = DeltaParams(
        stored="grouped", key_heads=keys, value_heads=heads, key_dim=key, value_dim=value, width=4
    )
    layer.keys, layer.heads, layer.step, layer.eps = keys, heads, None, 1e-6
    layer.qkv_sizes = [key, key, heads * value]
    layer.taps, layer.norm_weight = torch.randn(4, channels, device=DEVICE), torch.rand(value, device=DEVICE)
    layer.rate, layer.step_bias = torch.rand(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    kernels = (kernel_gates.delta_gates, kernel_gates.gated_norm, kernel_gates.rounded_norm)
    layer.ops = StateOps(conv.causal_conv, recur.recurrence, scan.selective_scan, *kernels)
    output: Any = SimpleNamespace(scale_order=lambda count: "columns" if count == tokens else None)
    layer.output = output
    parts = torch.randn(tokens, channels + heads * value + 2 * heads, device=DEVICE, dtype=HALF).split(
        [channels, heads * value, heads, heads], 1
    )

    def mixed(is_last: bool) -> Any:
        layer.is_last = is_last
        window = torch.zeros(2, 3, channels, device=DEVICE, dtype=HALF)
        return layer.mix(parts, (window, torch.zeros(2, heads, key, value, device=DEVICE)), rows)

    plain, rounded = mixed(True), mixed(False)
    codes, scales, _ = round_fp8(plain, True, by_column=True)
    assert torch.equal(rounded.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(rounded.scales, scales) and rounded.dtype == plain.dtype
