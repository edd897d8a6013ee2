"""`ConfigKeys`: typed look-ups in a `config.json`, where a fact may have several names.

Every number is checked against a range. The ranges are wide enough for any model, and narrow enough that no value
derived from the number overflows or exhausts the memory before sizes are checked.
"""

from __future__ import annotations

from typing import Any

from quire.files.reading import shown
from quire.types import ModelError

_MISSING: Any = object()

# Upper limits of integers, by the first of a field's names.
_MAX = {
    "num_hidden_layers": 4096,
    "n_layer": 4096,
    "num_attention_heads": 1 << 16,
    "n_head": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "n_embd": 1 << 20,
    "vocab_size": 1 << 24,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
}
_MAX_ANY = 1 << 30

# Ranges of numbers, both ends included, by the first of a field's names.
_RANGES = {
    "rms_norm_eps": (1e-30, 1.0),
    "layer_norm_eps": (1e-30, 1.0),
    "norm_epsilon": (1e-30, 1.0),
    "norm_eps": (1e-30, 1.0),
    "layer_norm_epsilon": (1e-30, 1.0),
    "rope_theta": (1.0 + 1e-6, 1e15),
    "rope_local_base_freq": (1.0 + 1e-6, 1e15),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "attention_factor": (1e-6, 1e3),
    "routed_scaling_factor": (1e-6, 1e6),
    "query_pre_attn_scalar": (1e-6, 1e9),
    "attn_logit_softcapping": (1e-6, 1e9),
    "final_logit_softcapping": (1e-6, 1e9),
    "partial_rotary_factor": (1e-3, 1.0),
    "short_factor": (1e-6, 1e6),
    "long_factor": (1e-6, 1e6),
    "alpha": (1e-3, 1e9),
    "llama_4_scaling_beta": (0.0, 1e3),
    "attn_scale": (0.0, 1e3),
    "router_jitter_noise": (0.0, 1e3),
    "activation_sparsity_pattern": (0.0, 1.0 - 1e-6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-9, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "time_step_min": (0.0, 1e3),
    **dict.fromkeys(
        (
            "lm_head_multiplier",
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
            "mlp_multipliers",
            "ssm_multipliers",
        ),
        (1e-6, 1e6),
    ),
    **{
        f"{half}_{which}_factor": (1e-6, 1e6)
        for half in ("linear_attn", "full_attn", "mlp")
        for which in ("alpha", "beta")
    },
    "swiglu_alpha": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "logit_scale": (1e-6, 1e6),
    "block_ffn_dim_multiplier": (1e-6, 1e6),
}


class ConfigKeys:
    """Typed look-ups in a config. Of several names for a field, the first one that is present counts.

    Every look-up raises ModelError if the field is missing without a default, or has a bad value.
    """

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """Return the value of a field as it is; null counts as missing."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        if default is _MISSING:
            raise ModelError(f"{self.where} lacks {names[0]}")
        return default

    def without(self, *names: str) -> ConfigKeys:
        """Return the config without some fields."""
        return ConfigKeys({k: v for k, v in self.config.items() if k not in names}, self.where)

    def refuse(self, name: str, wanted: str, value: object) -> ModelError:
        """Build the error for a value that is not `wanted`."""
        return ModelError(f"{self.where}: {name} must be {wanted}, got {shown(value)}")

    def integer(self, *names: str, default: Any = _MISSING, minimum: int = 1) -> int:
        """Return an integer between `minimum` and the field's upper limit."""
        value, limit = self.get(*names, default=default), _MAX.get(names[0], _MAX_ANY)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            wanted = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.refuse(names[0], wanted, value)
        if value > limit:
            raise self.refuse(names[0], f"at most {limit}", value)
        return value

    def number(self, *names: str, default: Any = _MISSING) -> float:
        """Return a number within the field's range."""
        value, (low, high) = self.get(*names, default=default), _RANGES[names[0]]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.refuse(names[0], "a number", value)
        if not low <= value <= high:  # NaN is in no range
            raise self.refuse(names[0], f"between {low:g} and {high:g}", value)
        return float(value)

    def numbers(self, name: str, max_length: int = 1 << 14) -> tuple[float, ...]:
        """Return a list of at most `max_length` numbers within the field's range."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) > max_length:
            raise self.refuse(name, f"a list of at most {max_length} numbers", values)
        return tuple(ConfigKeys({name: value}, self.where).number(name) for value in values)

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean; 0 and 1 are accepted."""
        value = self.get(*names, default=default)
        if value not in (True, False) or not isinstance(value, (bool, int)):
            raise self.refuse(names[0], "true or false", value)
        return bool(value)

    def text(self, *names: str, default: Any = _MISSING) -> str:
        """Return a string."""
        value = self.get(*names, default=default)
        if not isinstance(value, str):
            raise self.refuse(names[0], "a string", value)
        return value

    def section(self, *names: str) -> dict[str, Any]:
        """Return an object; an empty one if the field is missing."""
        value = self.get(*names, default={})
        if not isinstance(value, dict):
            raise self.refuse(names[0], "an object", value)
        return value

    def entries(self, name: str, kind: type, max_length: int = 1 << 16) -> list[Any] | None:
        """Return a list of at most `max_length` entries, all of type `kind`; None if the field is missing."""
        value = self.get(name, default=None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            raise self.refuse(name, f"a list of {kind.__name__}", value)
        if len(value) > max_length:
            raise self.refuse(name, f"a list of at most {max_length} entries", f"{len(value)} entries")
        return value

    def has(self, *names: str) -> bool:
        """Return whether the config has one of the names, even with the value null."""
        return any(name in self.config for name in names)


_MAX_IDS = 256


def token_ids(value: object, name: str, vocab_size: int, where: str) -> tuple[int, ...]:
    """Return the token ids of a field that may hold null, one id, or a list.

    Args:
        value: the field's value.
        name: the field's name, for messages.
        vocab_size: ids must be below it.
        where: the file, for messages.

    Raises:
        ModelError: if the value is anything else, or an id is out of range.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_IDS:
        raise ModelError(f"{where}: {name} must hold at most {_MAX_IDS} token ids, got {len(ids)}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ModelError(
                f"{where}: {name} must hold token ids below vocab_size {vocab_size}, got {shown(token)}"
            )
    return tuple(ids)
