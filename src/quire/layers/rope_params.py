"""`RopeParams`: the parameters of rotary position embeddings. Plain data, without torch.

models/config/rope.py parses them from a config.json, and models/config/gguf.py from GGUF metadata. layers/rope.py
computes the angles. The lengths that a scaling rule depends on are stored here, so serving a shorter context never
changes an angle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """Base and scaling rule of rotary embeddings; `inverse_frequencies` in layers/rope.py has the formulas.

    Attributes:
        theta: base of the frequencies.
        kind: the scaling rule: default, linear, dynamic, llama3, yarn, divisors or longrope; none: no rotation.
        factor: by how much the rule extends the context.
        original_max_len: length in tokens of the context that the model was trained on before it was extended.
        low_freq_factor, high_freq_factor: the ramp of llama3.
        beta_fast, beta_slow, truncate: the ramp of yarn, and whether its ends are rounded.
        attention_factor: factor of cos and sin (yarn and longrope; 1 for the other rules).
        divisors: one divisor per frequency, for kind "divisors", where a file stores the result of a rule, and for
            kind "longrope" up to `original_max_len`.
        long_divisors: the divisors of longrope if a longer context is served.
        rotary_dim: number of dimensions of a head that are rotated, the first ones; 0: all.
        interleaved: whether neighbours form a pair, instead of dimensions that are half of `rotary_dim` apart.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    rotary_dim: int = 0
    interleaved: bool = False

    def span(self, dim: int) -> int:
        """Return the distance between the two dimensions of a rotated pair, in heads of `dim`."""
        return 1 if self.interleaved else (self.rotary_dim or dim) // 2


NO_ROTATION = RopeParams(theta=1.0, kind="none")
