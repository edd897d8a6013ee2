"""What the sampling kernels share: a row's parameters, its scaled logits, its noise, and ordered floats.

The numbers are those of sampling/filters.py and sampling/noise.py. Every kernel that compares them is
compiled without fused multiply-add (`SAME_BITS`): the scaled logit of a token, and with it its mass, then
has the same bits wherever it is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The order of the parameters in a slot's row of the table, eight bytes each.
COLUMNS = ("temperature", "top_k", "top_p", "log_min_p", "seed_low", "seed_high")
SAME_BITS = {"enable_fp_fusion": False}

LARGEST = tl.constexpr(3.4028234663852886e38)
LOWEST = tl.constexpr(-3.4028234663852886e38)
NEVER = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))
# In place of a token, as in types/plan.py: a logit is NaN or +inf; every logit is -inf.
NOT_FINITE = tl.constexpr(-1)
NO_TOKEN = tl.constexpr(-2)
_WIDTH = tl.constexpr(len(COLUMNS))
_SIGN_FREE = tl.constexpr((1 << 31) - 1)
UNIT = tl.constexpr(2.0**40)


# --------------------------------------------------------------------------------------- parameters


@triton.jit
def temperature_of(table, slot):
    """0: greedy."""
    return tl.load(table + slot * _WIDTH).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def top_k_of(table, slot):
    """0: off."""
    return tl.load(table + slot * _WIDTH + 1)


@triton.jit
def top_p_of(table, slot):
    """1: off. In float64."""
    return tl.load(table + slot * _WIDTH + 2).to(tl.float64, bitcast=True)


@triton.jit
def log_min_p_of(table, slot):
    """-inf: off."""
    return tl.load(table + slot * _WIDTH + 3).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def is_filtered(table, slot):
    drawn = temperature_of(table, slot) > 0.0
    return drawn & (
        (top_k_of(table, slot) > 0) | (top_p_of(table, slot) < 1) | (log_min_p_of(table, slot) > NEVER)
    )


@triton.jit
def scale_of(table, slot):
    """What to multiply logits by."""
    temperature = temperature_of(table, slot)
    return tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def scaled(x, scale):
    """Logits by the temperature, in float32: nan becomes -inf, +inf the largest finite number."""
    x = x.to(tl.float32) * scale
    x = tl.where(x == x, x, NEVER)
    return tl.minimum(x, LARGEST)


@triton.jit
def load_scaled(at, ids, inside, scale):
    return scaled(tl.load(at + ids, mask=inside, other=NEVER), scale)


@triton.jit
def mass_of(x, top):
    """Unnormalised probability as an integer, 2^40 for the top token: sums are exact in any order."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


# --------------------------------------------------------------------------------------------- noise


@triton.jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def keys_of(table, slot, num_tokens):
    """The two uint32 keys of the row's next draw."""
    at = table + slot * _WIDTH
    low, high = tl.load(at + 4).to(tl.uint32), tl.load(at + 5).to(tl.uint32)
    position = tl.load(num_tokens + slot).to(tl.uint32)
    k0 = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position)
    k1 = mix(mix(mix(low ^ 0x3C6EF372) ^ high) ^ position)
    return k0, k1


@triton.jit
def log1p_of_minus(u):
    """log(1 - u) for 0 < u < 1: a series where 1 - u would lose the digits of u."""
    series = tl.fma(u, 1 / 8, 1 / 7)
    series = tl.fma(u, tl.fma(u, series, 1 / 6), 1 / 5)
    series = tl.fma(u, tl.fma(u, series, 1 / 4), 1 / 3)
    series = tl.fma(u, tl.fma(u, series, 1 / 2), 1.0)
    return tl.where(u < 0.125, -u * series, tl.log(1.0 - u))


@triton.jit
def uniform(ids, k0, k1):
    bits = mix(mix(ids.to(tl.uint32) ^ k0) ^ k1) & 0x7FFFFFFF
    u = bits.to(tl.int32).to(tl.float32) + 0.5
    return tl.minimum(u, 2147483520.0) * 4.656612873077393e-10  # 2^31 - 128, 2^-31


@triton.jit
def gumbel_of(u):
    return -tl.log(-log1p_of_minus(u))


@triton.jit
def any_beats(x, u, record):
    """False if no token's score can exceed the record: as -log1p(-u) >= u, that takes u < exp(x - record).

    In most blocks of a row there is none, and the two logarithms of the noise are saved. The slack is far
    beyond the rounding of scores.
    """
    slack = tl.where(record > NEVER, 1e-3 + tl.abs(record) * 1e-6, 0.0)
    return tl.max((u < tl.exp(x - record + slack)).to(tl.int32), 0) > 0


@triton.jit
def contend(x, ids, k0, k1, record, value, token):
    """One more block of tokens in a Gumbel-max draw: each lane keeps the best score of its own ids, which
    ascend, in `value`, and that id in `token`; `record` is the best of all."""
    u = uniform(ids, k0, k1)
    if any_beats(x, u, record):
        score = x + gumbel_of(u)
        token = tl.where(score > value, ids, token)
        value = tl.maximum(score, value)
        record = tl.max(value, 0)
    return record, value, token


# ------------------------------------------------------------------------------------ ordered floats


@triton.jit
def key_of(x):
    """int64 with the order of the float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ _SIGN_FREE).to(tl.int64)


@triton.jit
def float_of(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ _SIGN_FREE).to(tl.float32, bitcast=True)


@triton.jit
def best_of(value, ids):
    """The highest value and its id, of equals the lowest."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, ids, 0x7FFFFFFF), 0)
