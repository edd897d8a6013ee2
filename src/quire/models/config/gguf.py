"""`gguf_spec`: from the metadata of a GGUF file (llama.cpp's format) to a `ModelSpec`.

Some facts are not stored in the file but are constants of llama.cpp's graph for the architecture. They are listed
here, next to the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

from quire.files.reading import shown
from quire.layers.rope_params import RopeParams
from quire.layers.routing_params import Routing
from quire.models.config.gguf_families import LATENT, TRANSLATIONS, translated_spec
from quire.models.config.gguf_file import GGUFFile, GGUFTensor, open_gguf
from quire.models.config.keys import ConfigKeys, token_ids
from quire.models.config.rope import served_len
from quire.models.spec import ModelSpec, MoESpec
from quire.quant.spec import QuantSpec
from quire.types import ModelError

_DTYPES = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}  # quantised formats: bfloat16
_SWA_EVERY = 6  # Gemma 3: every sixth layer has no window
_GEMMA3_27B_LAYERS = 62  # Gemma 3 27B scales queries by hidden / heads instead of by head_dim


class Metadata:
    """The key/value pairs of a file. Keys that begin with a dot get the name of the architecture in front."""

    def __init__(self, file: GGUFFile, path: Path) -> None:
        self._values = file.metadata
        self.path = path
        self.arch = ""
        self.arch = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at `key`, or `default`."""
        return self._values.get(self.arch + key if key.startswith(".") else key, default)

    def require(self, key: str) -> Any:
        """Return the value at `key`, or raise ModelError if there is none."""
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"{self.path} lacks the metadata key {self.arch if key.startswith('.') else ''}{key}"
            )
        return value

    def integer(self, key: str, name: str, default: int | None = None) -> int:
        """Return the positive integer at `key`, checked against the range of the config.json field `name`."""
        return self._keys(key, name, default).integer(name)

    def number(self, key: str, name: str, default: float | None = None) -> float:
        """Return the number at `key`, checked against the range of the config.json field `name`."""
        return self._keys(key, name, default).number(name)

    def _keys(self, key: str, name: str, default: float | None) -> ConfigKeys:
        value = self.require(key) if default is None else self.get(key, default)
        return ConfigKeys({name: value}, f"{self.path}: {self.arch}{key}")


def gguf_spec(path: Path) -> ModelSpec:
    """Read the spec of the model in a .gguf file.

    Raises:
        ModelError: if the file is damaged, a value is bad, or the architecture is not supported.
    """
    file = open_gguf(path)
    meta = Metadata(file, path)
    known = sorted([*ARCHITECTURES, *TRANSLATIONS])
    if meta.arch not in known:
        raise ModelError(
            f"GGUF architecture {shown(meta.arch)} is not supported yet; supported are: {', '.join(known)}"
        )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    try:
        facts = _facts(meta, tensors)
        if meta.arch in TRANSLATIONS:
            trained_len = meta.integer(".context_length", "max_position_embeddings")
            rope = None if TRANSLATIONS[meta.arch].own_rope else _rope(meta, trained_len, 10000.0, tensors)
            return translated_spec(meta.arch, meta, facts, tensors, rope)
        return ModelSpec(**{**facts, **ARCHITECTURES[meta.arch](meta, facts, tensors)})
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ModelError(f"{path} holds a value of a wrong type ({shown(error)})") from error


def _facts(meta: Metadata, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Return the fields of the spec that all architectures have."""
    hidden, heads, layers = (
        meta.integer(".embedding_length", "hidden_size"),
        meta.integer(".attention.head_count", "num_attention_heads"),
        meta.integer(".block_count", "num_hidden_layers"),
    )
    kv_heads, head_dim = _head_sizes(meta, hidden, heads)
    vocab_size = tensors["token_embd.weight"].shape[-1]
    largest = max(tensors.values(), key=lambda tensor: tensor.n_elements)
    facts: dict[str, Any] = {
        "architecture": f"GGUF {meta.arch}",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _mlp_width(meta),
        "tie_embeddings": "output.weight" not in tensors,
        "dtype": _DTYPES.get(largest.tensor_type, "bfloat16"),
        "windows": (None,) * layers,
        "query_scale": head_dim**-0.5,
        "bos_token_id": next(iter(_token_ids(meta, vocab_size, "bos")), None),
        "eos_token_ids": _token_ids(meta, vocab_size, "eos", "eot", "eom"),
    }
    if largest.tensor_type not in _DTYPES:
        facts["quantization"] = QuantSpec(method="gguf", detail=largest.tensor_type.name)
    return facts


def _head_sizes(meta: Metadata, hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of K/V heads and the size of a head. Raise ModelError if they are not supported."""
    head_dim = meta.integer(".attention.key_length", "head_dim", hidden // heads)
    if meta.arch in LATENT:  # these keys then describe cached entries
        return heads, head_dim
    if (value_dim := meta.get(".attention.value_length", head_dim)) != head_dim:
        raise ModelError(
            f"{meta.path}: keys of {head_dim} and values of {value_dim} dimensions (attention.key_length, "
            "attention.value_length) are not supported"
        )
    found = meta.get(".attention.head_count_kv", heads)
    if isinstance(found, list):  # by layer: 0 if it does not attend
        found = max(found, default=0) or heads
    kv_heads = ConfigKeys({"num_key_value_heads": found}, f"{meta.path}: {meta.arch}.attention").integer(
        "num_key_value_heads"
    )
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{meta.path}: {heads} heads of {head_dim} with {kv_heads} K/V heads are not supported: the heads must be "
            "a multiple of the K/V heads, and their size even"
        )
    return kv_heads, head_dim


def _mlp_width(meta: Metadata) -> int:
    """Return the width of MLPs, the largest if a file has one for each layer; 1 if it has none."""
    found = meta.get(".feed_forward_length") or 1
    width = max(found) or 1 if isinstance(found, list) else found
    return ConfigKeys({"intermediate_size": width}, f"{meta.path}: {meta.arch}.feed_forward_length").integer(
        "intermediate_size"
    )


def _token_ids(meta: Metadata, vocab_size: int, *names: str) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    ids = [token for key in keys for token in token_ids(meta.get(key), key, vocab_size, str(meta.path))]
    return tuple(dict.fromkeys(ids))


# ------------------------------------------------------------------------------- the architectures


def _rotary(
    meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any], base: float = 10000.0
) -> dict[str, Any]:
    """Return the fields of architectures with rotary embeddings and RMS norms."""
    if meta.get(".rope.dimension_count", facts["head_dim"]) != facts["head_dim"]:
        raise ModelError(f"{meta.path}: partial rotary embeddings are not supported")
    trained_len = meta.integer(".context_length", "max_position_embeddings")
    rope = _rope(meta, trained_len, base, tensors)
    return {
        "rope": rope,
        "max_model_len": served_len(rope, trained_len, stretch=False),
        "norm_eps": meta.number(".attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        "activation": "silu",
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


def _rope(meta: Metadata, trained_len: int, base: float, tensors: dict[str, Any]) -> RopeParams:
    theta = meta.number(".rope.freq_base", "rope_theta", base)
    if "rope_freqs.weight" in tensors:  # Llama 3.1's rule is stored as one divisor per frequency
        divisors = np.asarray(tensors["rope_freqs.weight"].data, dtype=np.float32)
        return RopeParams(
            theta=theta, kind="divisors", original_max_len=trained_len, divisors=tuple(divisors.tolist())
        )
    kind = meta.get(".rope.scaling.type", "none")
    given = meta.get(".rope.scaling.factor", meta.get(".rope.scale_linear", 1.0)) or 1.0
    factor = ConfigKeys({"factor": given}, f"{meta.path}: {meta.arch}.rope.scaling").number("factor")
    if kind == "none" or factor == 1.0:
        return RopeParams(theta=theta, original_max_len=trained_len)
    if kind not in ("linear", "yarn") or meta.get(".rope.scaling.yarn_log_multiplier"):
        raise ModelError(f"{meta.path}: rope scaling {kind!r} is not supported; supported are: linear, yarn")
    attention_factor = (0.1 * math.log(factor) + 1.0) * meta.number(
        ".rope.scaling.attn_factor", "attention_factor", 1.0
    )
    return RopeParams(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=meta.integer(
            ".rope.scaling.original_context_length", "original_max_position_embeddings", trained_len
        ),
        beta_fast=meta.number(".rope.scaling.yarn_beta_fast", "beta_fast", 32.0),
        beta_slow=meta.number(".rope.scaling.yarn_beta_slow", "beta_slow", 1.0),
        attention_factor=attention_factor if kind == "yarn" else 1.0,
    )


def _llama(meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    fields = {"family": "llama", **_rotary(meta, facts, tensors)}
    if meta.get(".expert_count"):  # Mixtral's architecture is also called llama
        fields.update(family="moe", moe=_moe(meta, facts, facts["intermediate_size"]))
    return fields


def _qwen(meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    return {"family": "qwen", **_rotary(meta, facts, tensors)}


def _qwen3moe(meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    moe = _moe(meta, facts, meta.integer(".expert_feed_forward_length", "moe_intermediate_size"))
    return {"family": "moe", "moe": moe, **_rotary(meta, facts, tensors)}


def _moe(meta: Metadata, facts: dict[str, Any], intermediate: int) -> MoESpec:
    experts = meta.integer(".expert_count", "num_experts")
    top_k = meta.integer(".expert_used_count", "num_experts_per_tok")
    if top_k > experts:
        raise ModelError(f"{meta.path}: {top_k} experts per token, but only {experts} experts")
    return MoESpec(
        routing=Routing(num_experts=experts, top_k=top_k, renormalise=True),
        intermediate_size=intermediate,
        sparse=(True,) * facts["num_layers"],
    )


def _gemma3(meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    layers, hidden = facts["num_layers"], facts["hidden_size"]
    window = meta.integer(".attention.sliding_window", "sliding_window")
    fields = {"family": "gemma3", **_rotary(meta, facts, tensors, base=1e6), "activation": "gelu_tanh"}
    if layers == _GEMMA3_27B_LAYERS:
        fields["query_scale"] = (hidden / facts["num_heads"]) ** -0.5
    soft_cap = meta.get(".final_logit_softcapping")
    if soft_cap is not None:
        soft_cap = meta.number(".final_logit_softcapping", "final_logit_softcapping")
    local_theta = meta.number(".rope.freq_base_swa", "rope_theta", 10000.0)
    return {
        **fields,
        "local_rope": RopeParams(theta=local_theta, original_max_len=fields["max_model_len"]),
        "windows": tuple(None if (i + 1) % _SWA_EVERY == 0 else window for i in range(layers)),
        "layout": "sandwich",
        "norm": "offset_rms",
        "embedding_scale": math.sqrt(hidden),
        "rounds_embedding_scale": True,
        "final_soft_cap": soft_cap,
    }


def _gpt2(meta: Metadata, facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": "gpt2",
        "rope": None,
        "mlp": "plain",
        "max_model_len": meta.integer(".context_length", "max_position_embeddings"),
        "num_positions": meta.integer(".context_length", "max_position_embeddings"),
        "norm_eps": meta.number(".attention.layer_norm_epsilon", "layer_norm_epsilon"),
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    }


ARCHITECTURES: dict[str, Callable[[Metadata, dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen2vl": _qwen,  # the text part, as in the following two of this kind
    "qwen3": _qwen,
    "qwen3moe": _qwen3moe,
    "qwen3vl": _qwen,
    "qwen3vlmoe": _qwen3moe,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
