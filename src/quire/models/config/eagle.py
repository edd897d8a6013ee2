"""The configuration of EAGLE draft heads, from the `config.json` of their checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.files.reading import read_json
from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.heads.eagle1 import EagleSpec
from quire.models.heads.eagle3 import Eagle3Spec
from quire.models.spec import ModelSpec
from quire.types import ConfigError, ModelError


def load_eagle3_spec(folder: Path, target: ModelSpec) -> Eagle3Spec:
    """Read the configuration of the EAGLE-3 head in `folder`, for drafts that `target` verifies.

    The head serves the context of `target`, whatever length it was trained with. Its vocabulary is that of `target`.

    Raises:
        ModelError: if the file is missing or has a bad value.
        ConfigError: if it describes a head for another model.
    """
    keys = _keys(folder)
    layer = _layer(keys, target, folder)
    vocab = keys.integer("draft_vocab_size", default=layer.vocab_size)
    hidden = keys.integer("target_hidden_size", default=target.hidden_size)
    _check_width(hidden, target)
    normed = keys.flag("norm_before_residual")
    return Eagle3Spec(layer, vocab, _taps(keys, target), hidden, normed)


def load_eagle_spec(folder: Path, target: ModelSpec) -> EagleSpec:
    """Read the configuration of the EAGLE head in `folder`. Arguments and errors are those of `load_eagle3_spec`."""
    keys = _keys(folder)
    if keys.has("model"):  # vLLM's conversions
        keys = ConfigKeys(keys.section("model"), keys.where)
    if keys.flag("add_para_norm"):
        raise ConfigError(
            f"the draft head in {folder} norms its inputs (add_para_norm), which spec_method eagle does not; use a head of "
            "the original layout, or spec_method ngram"
        )
    layer = _layer(keys, target, folder)
    _check_width(layer.hidden_size, target)
    return EagleSpec(layer)


def _keys(folder: Path) -> ConfigKeys:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json")
    return ConfigKeys(read_json(folder / "config.json"), f"{folder.name}/config.json")


def _layer(keys: ConfigKeys, target: ModelSpec, folder: Path) -> ModelSpec:
    """Return the sizes of the layer of a head, which serves the context and the vocabulary of `target`."""
    names = keys.entries("architectures", str) or ["LlamaForCausalLM"]
    has_bias = keys.flag("attention_bias")
    layer = decoder_spec(names[0], "llama", keys, qkv_bias=has_bias, o_bias=has_bias)
    if layer.num_layers != 1:
        raise keys.refuse("num_hidden_layers", "1, because draft heads have one layer", layer.num_layers)
    window = optional_window(keys) if keys.flag("use_sliding_window", default=True) else None
    if window is not None and window < target.max_model_len:
        raise ConfigError(
            f"the draft head in {folder} attends to a window of {window} tokens (sliding_window), but drafting reads the "
            "entries of all tokens; use a head without a window, or spec_method ngram"
        )
    if layer.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft head was trained for a vocabulary of {layer.vocab_size} tokens, but the model has "
            f"{target.vocab_size}; use a draft head that was trained for this model"
        )
    return replace(layer, max_model_len=target.max_model_len, tie_embeddings=False)


def _check_width(hidden: int, target: ModelSpec) -> None:
    """Raise ConfigError unless the head reads hidden states of the model's width."""
    if hidden != target.hidden_size:
        raise ConfigError(
            f"the draft head reads hidden states of {hidden} numbers, but the model has {target.hidden_size}; use a draft "
            "head that was trained for this model"
        )


def _taps(keys: ConfigKeys, target: ModelSpec) -> tuple[int, ...]:
    """Return the layers in front of which the head reads.

    A config may name the layers behind which it reads. The default is that of the authors: three layers near the
    beginning, the middle and the end.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    named = keys if keys.has(name) else ConfigKeys(keys.section("eagle_config"), keys.where)
    layers = named.entries(name, int)
    if layers:
        return tuple(layer + 1 for layer in layers)
    count = target.num_layers
    return 2, count // 2, count - 3
