"""GGUF metadata of models with states: fields of their config.json. See gguf_families.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.layers.mixer_params import DeltaParams
from quire.models.config.gguf_source import GGUFSource
from quire.models.spec import ModelSpec


def qwen_next(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Qwen3-Next and Qwen3.5."""
    sizes = source.integers(
        linear_num_key_heads=".ssm.group_count",
        linear_num_value_heads=".ssm.time_step_rank",
        linear_key_head_dim=".ssm.state_size",
        linear_conv_kernel_dim=".ssm.conv_kernel",
    )
    heads = sizes["linear_num_value_heads"]
    return {
        **sizes,
        "linear_value_head_dim": source.quotient(".ssm.inner_size", heads, "linear_value_head_dim"),
        "layer_types": _kinds(source.layers_with("ssm_a")),
    }


def with_split_projections(spec: ModelSpec, source: GGUFSource) -> ModelSpec:
    """Return the spec of Qwen3-Next with the projections that files have, which are those of Qwen3.5."""
    assert isinstance(spec.mixer, DeltaParams)
    return replace(spec, mixer=replace(spec.mixer, stored="split"))


def nemotron_h(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Nemotron-H: the kind of each layer follows from its tensors."""
    sizes = source.integers(
        mamba_num_heads=".ssm.time_step_rank",
        n_groups=".ssm.group_count",
        ssm_state_size=".ssm.state_size",
        conv_kernel=".ssm.conv_kernel",
    )
    named = (
        ("ssm_a", "linear_attention"),
        ("attn_q.weight", "full_attention"),
        ("ffn_gate_inp.weight", "moe"),
    )
    present = {kind: source.layers_with(tensor) for tensor, kind in named}
    config: dict[str, Any] = {
        **sizes,
        "mamba_head_dim": source.quotient(".ssm.inner_size", sizes["mamba_num_heads"], "mamba_head_dim"),
        "layers_block_type": [
            next((kind for kind, layers in present.items() if layers[index]), "mlp")
            for index in range(source.layers)
        ],
        "layer_norm_epsilon": source.meta.get(".attention.layer_norm_rms_epsilon"),
        "use_bias": source.has("ssm_in.bias"),
        "use_conv_bias": source.has("ssm_conv1d.bias"),
        "mlp_bias": source.has("ffn_up.bias"),
        "moe_latent_size": source.meta.get(".moe_latent_size"),
    }
    if source.meta.get(".expert_count"):
        config["moe_shared_expert_intermediate_size"] = source.meta.integer(
            ".expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"
        )
    return config


def granite_hybrid(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Granite 4. The MLP beside experts counts as a shared expert in files."""
    width = source.facts["intermediate_size"]
    return {
        **_mamba2(source),
        "mamba_expand": source.quotient(".ssm.inner_size", source.facts["hidden_size"], "mamba_expand"),
        "layer_types": _kinds(source.layers_with("ssm_a")),
        "position_embedding_type": "rope" if source.meta.get(".rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": source.meta.integer(
            ".expert_shared_feed_forward_length", "shared_intermediate_size", width
        ),
        "num_local_experts": source.meta.get(".expert_count") or 0,
    }


def with_split_gate(spec: ModelSpec, source: GGUFSource) -> ModelSpec:
    """Return the spec of Granite 4 with gate and up apart, as files have them."""
    names = {name: own for name, own in spec.names.items() if name != "gate_up_proj"}
    return replace(spec, fused_gate_up=False, names=names)


def falcon_h1(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Falcon-H1, whose scales the converter multiplies into the weights."""
    return {
        **_mamba2(source),
        "mamba_d_ssm": source.meta.integer(".ssm.inner_size", "mamba_d_ssm"),
        "mamba_rms_norm": source.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": source.has("ssm_out.bias"),
    }


def jamba(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Jamba; `with_layers_of_jamba` adds the kinds of its layers."""
    return {
        **source.integers(
            mamba_d_state=".ssm.state_size",
            mamba_dt_rank=".ssm.time_step_rank",
            mamba_d_conv=".ssm.conv_kernel",
        ),
        "mamba_expand": source.quotient(".ssm.inner_size", source.facts["hidden_size"], "mamba_expand"),
        "mamba_conv_bias": source.has("ssm_conv1d.bias"),
        "mamba_proj_bias": source.has("ssm_in.bias"),
        "num_experts": source.meta.get(".expert_count") or 1,
    }


def with_layers_of_jamba(spec: ModelSpec, source: GGUFSource) -> ModelSpec:
    """Return the spec of Jamba with the kinds of layers that the file has."""
    mixes, sparse = source.layers_with("ssm_a"), source.layers_with("ffn_gate_inp.weight")
    moe = replace(spec.moe, sparse=sparse) if spec.moe else None
    return replace(spec, mixes=mixes, attends=tuple(not each for each in mixes), moe=moe)


def kimi_linear(source: GGUFSource) -> dict[str, Any]:
    """Return the fields of Kimi Linear beside those of latent attention."""
    mixes = source.layers_with("ssm_a")
    heads = source.shape(f"blk.{mixes.index(True)}.ssm_a") if any(mixes) else (1,)
    sparse = source.layers_with("ffn_gate_inp.weight")
    return {
        "num_shared_experts": source.meta.integer(".expert_shared_count", "num_shared_experts"),
        "linear_num_heads": max(heads),
        "linear_head_dim": source.meta.integer(".kda.head_dim", "linear_head_dim"),
        "linear_conv_kernel_dim": source.meta.integer(".ssm.conv_kernel", "linear_conv_kernel_dim"),
        "layer_types": _kinds(mixes),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
    }


def _mamba2(source: GGUFSource) -> dict[str, Any]:
    return {
        **source.integers(
            mamba_n_heads=".ssm.time_step_rank",
            mamba_n_groups=".ssm.group_count",
            mamba_d_state=".ssm.state_size",
            mamba_d_conv=".ssm.conv_kernel",
        ),
        "mamba_conv_bias": source.has("ssm_conv1d.bias"),
        "mamba_proj_bias": source.has("ssm_in.bias"),
    }


def _kinds(mixes: tuple[bool, ...]) -> list[str]:
    return ["linear_attention" if each else "full_attention" for each in mixes]
