"""Functions that the sampling kernels share: a row's parameters, scaled logits, noise, and ordered floats.

They compute the same numbers as sampling/filters.py and sampling/noise.py. Kernels that compare such numbers are
compiled without fused multiply-add (`SAME_BITS`), so the scaled logit of a token, and its mass, has the same bits
wherever it is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The columns of a slot's row in the parameter table, eight bytes each.
COLUMNS = ("temperature", "top_k", "top_p", "log_min_p", "seed_low", "seed_high")
SAME_BITS = {"enable_fp_fusion": False}

LARGEST = tl.constexpr(3.4028234663852886e38)
LOWEST = tl.constexpr(-3.4028234663852886e38)
NEVER = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))
# Results that are not tokens, as in types/plan.py.
NOT_FINITE = tl.constexpr(-1)  # a logit is NaN or +inf
NO_TOKEN = tl.constexpr(-2)  # every logit is -inf
_WIDTH = tl.constexpr(len(COLUMNS))
_TEMPERATURE = tl.constexpr(COLUMNS.index("temperature"))
_TOP_K = tl.constexpr(COLUMNS.index("top_k"))
_TOP_P = tl.constexpr(COLUMNS.index("top_p"))
_LOG_MIN_P = tl.constexpr(COLUMNS.index("log_min_p"))
_SEED_LOW = tl.constexpr(COLUMNS.index("seed_low"))
_SEED_HIGH = tl.constexpr(COLUMNS.index("seed_high"))
_SIGN_FREE = tl.constexpr((1 << 31) - 1)
UNIT = tl.constexpr(2.0**40)  # the mass of one token of the largest logit


# --------------------------------------------------------------------------------------- parameters


@triton.jit
def temperature_of(table, slot):
    """Return the temperature; 0 means greedy."""
    return tl.load(table + slot * _WIDTH + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def top_k_of(table, slot):
    """Return top_k; 0 means off."""
    return tl.load(table + slot * _WIDTH + _TOP_K)


@triton.jit
def top_p_of(table, slot):
    """Return top_p in float64; 1 means off."""
    return tl.load(table + slot * _WIDTH + _TOP_P).to(tl.float64, bitcast=True)


@triton.jit
def log_min_p_of(table, slot):
    """Return the logarithm of min_p; -inf means off."""
    return tl.load(table + slot * _WIDTH + _LOG_MIN_P).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def is_filtered(table, slot):
    """Return whether the slot draws with top_k, top_p or min_p."""
    drawn = temperature_of(table, slot) > 0.0
    return drawn & (
        (top_k_of(table, slot) > 0) | (top_p_of(table, slot) < 1) | (log_min_p_of(table, slot) > NEVER)
    )


@triton.jit
def scale_of(table, slot):
    """Return the factor of the logits, 1 / temperature."""
    temperature = temperature_of(table, slot)
    return tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def scaled(x, scale):
    """Return the logits times `scale` in float32. NaN becomes -inf, +inf the largest finite number."""
    x = x.to(tl.float32) * scale
    x = tl.where(x == x, x, NEVER)
    return tl.minimum(x, LARGEST)


@triton.jit
def load_scaled(at, ids, inside, scale):
    return scaled(tl.load(at + ids, mask=inside, other=NEVER), scale)


@triton.jit
def mass_of(x, top):
    """Return the unnormalised probability as an integer, 2^40 for the top token; sums are exact in any order."""
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
def keys_of(table, slot, position):
    """Return the two uint32 keys of the draw at a position."""
    at = table + slot * _WIDTH
    low, high = tl.load(at + _SEED_LOW).to(tl.uint32), tl.load(at + _SEED_HIGH).to(tl.uint32)
    position = position.to(tl.uint32)
    k0 = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position)
    k1 = mix(mix(mix(low ^ 0x3C6EF372) ^ high) ^ position)
    return k0, k1


@triton.jit
def log1p_of_minus(u):
    """Return log(1 - u) for 0 < u < 1, by a series where 1 - u would lose the digits of u."""
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
    """Return False if no token's score can exceed the record.

    Because -log1p(-u) >= u, exceeding it takes u < exp(x - record). In most blocks of a row no token does, which saves
    the two logarithms of the noise. The slack is far larger than the rounding error of a score.
    """
    slack = tl.where(record > NEVER, 1e-3 + tl.abs(record) * 1e-6, 0.0)
    return tl.max((u < tl.exp(x - record + slack)).to(tl.int32), 0) > 0


@triton.jit
def contend(x, ids, k0, k1, record, value, token):
    """Add a block of tokens to a Gumbel-max draw.

    Each lane keeps its best score in `value` and the id of that score in `token`. The ids of a lane ascend. `record` is the
    best score of all lanes.
    """
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
    """Return an int64 that orders like the float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ _SIGN_FREE).to(tl.int64)


@triton.jit
def float_of(key):
    """Return the float32 of a key of `key_of`."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ _SIGN_FREE).to(tl.float32, bitcast=True)


@triton.jit
def best_of(value, ids):
    """Return the highest value and its id, the lowest id of equal values."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, ids, 0x7FFFFFFF), 0)
