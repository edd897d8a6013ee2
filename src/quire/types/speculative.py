"""vLLM's `speculative_config`, as settings of Quire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.types.errors import ConfigError

METHODS = ("ngram", "suffix", "draft", "eagle", "eagle3", "mtp")
_FIELDS = {
    "method": "spec_method",
    "model": "spec_model",
    "num_speculative_tokens": "spec_tokens",
    "quantization": "spec_quantization",
}
# vLLM's names of methods, and those of the papers: EAGLE-2 uses the heads of the first EAGLE.
_ALIASES = {
    "eagle1": "eagle",
    "eagle2": "eagle",
    "draft_model": "draft",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
}
# Fields that tune vLLM's own implementation and change no output.
_IGNORED = {"prompt_lookup_max", "prompt_lookup_min", "disable_padded_drafter_batch", "max_model_len"}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Quire that correspond to a `speculative_config`.

    Raises:
        ConfigError: if a field is unknown or the method is missing.
    """
    unknown = sorted(set(config) - set(_FIELDS) - _IGNORED)
    if unknown:
        raise ConfigError(
            f"speculative_config has no field {unknown[0]!r}; its fields are {', '.join((*_FIELDS, *sorted(_IGNORED)))}"
        )
    if "method" not in config:
        raise ConfigError(f"speculative_config needs a method: {', '.join(METHODS)}")
    method = config["method"]
    if method in _ALIASES:
        config = {**config, "method": _ALIASES[method]}
    return {_FIELDS[name]: value for name, value in config.items() if name in _FIELDS}
