"""One token of each row through a gated delta layer: convolution, gates, delta rule and gated norm in one kernel.

At a few rows these operations are so small that each costs its launch. A program owns one value head of one row. It loads
the head's state, which the kernel in front does not write, before that kernel has ended. The value heads of a key head
convolve the same queries and keys, so the last of their programs to arrive moves that part of the window on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.state.rows import StateRows
from quire.kernels.target import target_of

MOST_ROWS = 16  # with more, separate kernels read states at the bandwidth of memory
_MOST_NUMBERS = 1 << 14  # of the state of a head: 64 per thread


@triton.jit
def _load_old(window, place, channel, channels, mask, WIDTH: tl.constexpr):
    """Load the part of a window with these channels: [KEPT_PAD, channels]."""
    at = place[:, None] * channels + channel[None, :]
    return tl.load(window + at, mask=mask[None, :] & (place < WIDTH - 1)[:, None], other=0.0)


@triton.jit
def _convolved(old, new, taps, place, channel, channels, inside, WIDTH: tl.constexpr):
    """Return the activated convolution of some channels in fp32, rounded to the dtype of `new`."""
    at = place[:, None] * channels + channel[None, :]
    weight = tl.load(taps + at, mask=inside[None, :] & (place < WIDTH - 1)[:, None], other=0.0)
    total = tl.sum(old.to(tl.float32) * weight, 0)
    total += new.to(tl.float32) * tl.load(taps + (WIDTH - 1) * channels + channel, mask=inside, other=0.0)
    total = total * tl.sigmoid(total)
    return total.to(new.dtype).to(tl.float32)


@triton.jit
def _move_on(window, old, new, place, channel, channels, inside, WIDTH: tl.constexpr):
    """Write the window without its oldest input and with `new` at its end."""
    to = window + (place - 1)[:, None] * channels + channel[None, :]
    tl.store(to, old, mask=inside[None, :] & ((place > 0) & (place < WIDTH - 1))[:, None])
    tl.store(window + (WIDTH - 2) * channels + channel, new.to(window.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@kernel
def _delta_step(
    qkv,  # [tokens, q | k | v], row stride `qkv_token`
    z,  # [tokens, HEADS * V], row stride `z_token`
    b,  # [tokens, HEADS], row stride `b_token`
    a,  # [tokens, HEADS], row stride `a_token`
    taps,  # float32 [WIDTH, channels]
    window,  # [states, WIDTH - 1, channels]
    rate,  # float32 [HEADS]
    step_bias,  # float32 [HEADS]
    state,  # float32 [states, HEADS, K, V]
    norm,  # float32 [V]
    index,  # int64 [rows]
    starts,  # int32 [rows + 1]
    fresh,  # bool [rows]
    arrived,  # int32 [rows, KEYS], 0 before and after
    out,  # [tokens, HEADS, V]
    qkv_token,
    z_token,
    b_token,
    a_token,
    eps,
    scale,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (value heads, rows)."""
    head, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # A step begins with kernels that take no part in dependent launch. So what it reads of the rows, and what the step
    # before has written, is in place before the wait.
    token = tl.load(starts + row).to(tl.int64)
    works = tl.load(starts + row + 1) > token
    own = tl.load(index + row).to(tl.int64)
    goes_on = works & (tl.load(fresh + row).to(tl.int1) == 0)
    key_head = head // (HEADS // KEYS)
    key, value, place = tl.arange(0, K_PAD), tl.arange(0, V_PAD), tl.arange(0, KEPT_PAD)
    has_key, has_value = key < K, value < V
    channels = 2 * KEYS * K + HEADS * V
    of_q, of_v = key_head * K + key, 2 * KEYS * K + head * V + value
    of_k = KEYS * K + of_q
    inside = has_key[:, None] & has_value[None, :]
    part = state + (own * HEADS + head) * K * V + key[:, None] * V + value[None, :]
    matrix = tl.load(part, mask=inside & goes_on, other=0.0)
    kept = window + own * (WIDTH - 1) * channels
    old_q = _load_old(kept, place, of_q, channels, has_key & goes_on, WIDTH)
    old_k = _load_old(kept, place, of_k, channels, has_key & goes_on, WIDTH)
    old_v = _load_old(kept, place, of_v, channels, has_value & goes_on, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if works:
        x = qkv + token * qkv_token
        new_q = tl.load(x + of_q, mask=has_key, other=0.0)
        new_k = tl.load(x + of_k, mask=has_key, other=0.0)
        new_v = tl.load(x + of_v, mask=has_value, other=0.0)
        gate = tl.load(z + token * z_token + head * V + value, mask=has_value, other=0.0).to(tl.float32)
        strength = tl.sigmoid(tl.load(b + token * b_token + head).to(tl.float32))
        time = tl.load(a + token * a_token + head).to(tl.float32) + tl.load(step_bias + head)
        step = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
        decay = tl.exp(-tl.load(rate + head) * step)
        q = _unit(_convolved(old_q, new_q, taps, place, of_q, channels, has_key, WIDTH)) * scale
        k = _unit(_convolved(old_k, new_k, taps, place, of_k, channels, has_key, WIDTH))
        v = _convolved(old_v, new_v, taps, place, of_v, channels, has_value, WIDTH)
        matrix *= decay
        # Both sums are over the old state, so that neither waits for the other: S' q = S q + (k q) w.
        written = (v - tl.sum(matrix * k[:, None], 0)) * strength
        read = tl.sum(matrix * q[:, None], 0) + tl.sum(k * q, 0) * written
        tl.store(part, matrix + k[:, None] * written[None, :], mask=inside)
        read = tl.where(has_value, read, 0.0).to(out.dtype.element_ty).to(tl.float32)
        weight = tl.load(norm + value, mask=has_value, other=0.0)
        normed = read * tl.rsqrt(tl.sum(read * read, 0) / V + eps) * weight
        opened = normed * (gate * tl.sigmoid(gate))
        tl.store(out + (token * HEADS + head) * V + value, opened.to(out.dtype.element_ty), mask=has_value)
        tl.debug_barrier()  # all threads have read the window
        _move_on(kept, old_v, new_v, place, of_v, channels, has_value, WIDTH)
        if tl.atomic_add(arrived + row * KEYS + key_head, 1, sem="acq_rel") == HEADS // KEYS - 1:
            tl.store(arrived + row * KEYS + key_head, 0)
            _move_on(kept, old_q, new_q, place, of_q, channels, has_key, WIDTH)
            _move_on(kept, old_k, new_k, place, of_k, channels, has_key, WIDTH)


class DeltaStep:
    """A gated delta layer between its projections, for rows of one token each."""

    def __init__(
        self,
        keys: int,
        key_dim: int,
        heads: int,
        value_dim: int,
        taps: torch.Tensor,
        rate: torch.Tensor,
        step_bias: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> None:
        """Keep the parameters of the layer.

        Args:
            keys, key_dim: number and size of key heads.
            heads, value_dim: number and size of value heads.
            taps: float32 [width, channels] of the convolution of q | k | v.
            rate, step_bias: float32 [heads] of the decays.
            norm: float32 [value dim].
            eps: of the norm.
        """
        self.keys, self.heads, self.key_dim, self.value_dim = keys, heads, key_dim, value_dim
        self.taps, self.rate, self.step_bias, self.norm, self.eps = taps, rate, step_bias, norm, eps
        self.arrived = torch.zeros(
            MOST_ROWS * keys, dtype=torch.int32, device=taps.device
        )  # 0 between launches

    def takes(self, rows: StateRows) -> bool:
        """Return whether these are few rows of at most one token."""
        ones = rows.short_only and rows.most == 1 and rows.targets is None
        return ones and len(rows.index) <= MOST_ROWS

    def __call__(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        window: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Advance each row by its token, and return the gated and normed reads: [tokens, heads * value dim].

        Args:
            qkv: queries, keys and values, [tokens, channels]; rows are contiguous, as are those of the next three.
            z: gates of the norm, [tokens, heads * value dim].
            b: logits of the rates, [tokens, heads].
            a: inputs of the decays, [tokens, heads].
            window: [states, width - 1, channels], updated.
            state: float32 [states, heads, key dim, value dim], updated.
            rows: rows that `takes` accepts.
        """
        assert qkv.stride(1) == z.stride(1) == b.stride(1) == a.stride(1) == 1
        tokens, device, width = qkv.shape[0], qkv.device, self.taps.shape[0]
        out = torch.empty(tokens, self.heads * self.value_dim, device=device, dtype=qkv.dtype)
        pdl = target_of(device).has_dependent_launch
        _delta_step[(self.heads, len(rows.index))](
            qkv, z, b, a, self.taps, window, self.rate, self.step_bias, state, self.norm, rows.index, rows.starts,
            rows.fresh, self.arrived, out, qkv.stride(0), z.stride(0), b.stride(0), a.stride(0), self.eps,
            self.key_dim**-0.5,
            HEADS=self.heads, KEYS=self.keys, K=self.key_dim, V=self.value_dim, WIDTH=width,
            K_PAD=triton.next_power_of_2(self.key_dim), V_PAD=triton.next_power_of_2(self.value_dim),
            KEPT_PAD=triton.next_power_of_2(max(width - 1, 2)), PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
        return out


def make_delta_step(
    keys: int, key_dim: int, heads: int, value_dim: int, *parameters: Any
) -> DeltaStep | None:
    """Return a `DeltaStep`, whose arguments these are; None if the state of a head does not fit into registers."""
    if triton.next_power_of_2(key_dim) * triton.next_power_of_2(value_dim) > _MOST_NUMBERS:
        return None
    return DeltaStep(keys, key_dim, heads, value_dim, *parameters)
