"""`RopeParams`: how the angles of rotary position embeddings are made. Plain data, no torch.

Read from a checkpoint's config by models/spec.py, turned into tables by layers/rope.py. Lengths that a
scaling rule depends on are resolved here, so that serving a shorter context never changes an angle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """Base `theta` and the scaling rule `kind`: default, linear, dynamic, llama3, yarn or divisors.

    `original_max_len` is the context the model was trained on before its context was extended.
    `attention_factor` multiplies cos and sin (yarn; 1 elsewhere). `divisors` of the frequencies stand for a rule already applied.
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
