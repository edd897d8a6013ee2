"""Counter-based sampling noise: a pure function of (request seed, position, vocabulary index).

It does not depend on the batch, the rank, the partition into steps, or an earlier draw. So a request gives the same
tokens alone, in a batch, after preemption, and on every rank. The hash uses 32-bit integer operations only, so its
bits agree on every device; a Triton kernel can compute it in uint32.

    mix(x):  x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
    k0   = mix(mix(mix(lo ^ 0x9E3779B9) ^ hi) ^ position)    lo, hi: halves of the 64-bit seed
    k1   = mix(mix(mix(lo ^ 0x3C6EF372) ^ hi) ^ position)
    bits = mix(mix(v ^ k0) ^ k1)                             v: vocabulary index
    u    = min(float32(bits & 0x7FFFFFFF) + 0.5, 2^31 - 128) / 2^31
    g    = -log(-log1p(-u))                                  in float32

`>>` is the logical shift. A high g comes from a small u, where float32 is dense. The upper tail, which decides the
draw, is therefore resolved to 2^-32, and ties between tokens are very rare.

Sources: Gumbel-max, Gumbel (1954), Maddison et al. (arXiv:1411.0030); counter-based random numbers,
Salmon et al. (SC 2011); the constants of `mix` ("lowbias32"), Chris Wellons, hash-prospector.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_STREAM_0 = 0x9E3779B9 - (1 << 32)
_STREAM_1 = 0x3C6EF372
_MASK_15 = (1 << 17) - 1  # the bits that remain after a logical shift by 15
_MASK_16 = (1 << 16) - 1
_MASK_31 = (1 << 31) - 1
_LARGEST = float(2**31 - 128)  # keeps u below 1: the largest float32 under 2^31


def mix_(x: Tensor) -> Tensor:
    """Apply the 32-bit mixing function in place to an int32 tensor; multiplication wraps."""
    shifted = torch.empty_like(x)  # reused, because allocation costs more than the arithmetic
    x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(_MASK_16)
    x *= _MULTIPLY_1
    x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(_MASK_15)
    x *= _MULTIPLY_2
    x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(_MASK_16)
    return x


def row_keys(seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return two int32 keys per row, from the int32 halves of the seed and the int32 positions."""
    k0 = mix_(mix_(mix_(seed_low ^ _STREAM_0) ^ seed_high) ^ positions)  # [rows]
    k1 = mix_(mix_(mix_(seed_low ^ _STREAM_1) ^ seed_high) ^ positions)  # [rows]
    return k0, k1


def noise_bits(k0: Tensor, k1: Tensor, vocab_ids: Tensor) -> Tensor:
    """Return int32 hash bits; `k0`, `k1` and the int32 `vocab_ids` are broadcast against each other."""
    return mix_(mix_(vocab_ids ^ k0).bitwise_xor_(k1))


def gumbel(k0: Tensor, k1: Tensor, vocab_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, in the broadcast shape of the arguments."""
    bits = noise_bits(k0, k1, vocab_ids).bitwise_and_(_MASK_31)
    u = bits.float().add_(0.5).clamp_(max=_LARGEST).mul_(2.0**-31)
    return u.neg_().log1p_().neg_().log_().neg_()
