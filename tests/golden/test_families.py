"""Every model family against transformers: tiny random checkpoints, fp32, odd shapes, logits and tokens.

Weights have a large variance, and norms and biases are not left at 1 and 0. So a wrong scale, a missing bias or a
misplaced norm changes the logits by far more than the tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from whole import greedy, last_logits, load_model, logits_of, whole_batch

from quire.models.spec import ModelSpec

transformers = pytest.importorskip("transformers", reason="transformers makes the reference models")
torch.set_num_threads(1)

VOCAB = 97
ROWS = [[5, 17, 3, 88, 42, 9, 61, 20, 33, 7, 2, 71, 50, 14, 96, 8, 27], [1, 60, 33, 4, 12]]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 5, "decoder_sparse_step": 1}


SIGMOID_MOE = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
GLM4_MOE = {**SIGMOID_MOE, "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE = {
    "original_max_position_embeddings": 4,
    **rope("longrope", partial_rotary_factor=0.5, short_factor=[1.5, 2.5], long_factor=[3.0, 9.0]),
}
LONGROPE_SHORT = rope("longrope", short_factor=[1.5, 2.5, 1.0, 2.0], long_factor=[3.0, 9.0, 3.0, 8.0])
GRANITE = {
    "head_dim": 8,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 5,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-dim-from-hidden": ("Llama", {"head_dim": None}),
    "llama-linear": ("Llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=3.0)),
    "llama-llama3": ("Llama", LLAMA3),
    "llama-yarn": ("Llama", YARN),
    "llama-yarn-mscale": (
        "Llama",
        rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, truncate=False),
    ),
    "llama-yarn-truncated": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                **rope("yarn", factor=4.0, original_max_position_embeddings=4096)["rope_parameters"],
                "rope_theta": 1e4,
            },
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied-yarn": ("Qwen3", {"tie_word_embeddings": True, **YARN}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "gemma3": ("Gemma3Text", GEMMA),
    # a field of the config that transformers ignores
    "gemma3-attention-cap": ("Gemma3Text", {**GEMMA, "attn_logit_softcapping": 0.5}),
    "gemma3-linear": (
        "Gemma3Text",
        {
            **GEMMA,
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "gemma3-biases": ("Gemma3Text", {**GEMMA, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 9.0}),
    "gemma2-without-caps": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "phi3": ("Phi3", {"head_dim": 8, "num_attention_heads": 6, "sliding_window": 5}),
    "phi3-partial": ("Phi3", {"head_dim": 8, **rope("default", partial_rotary_factor=0.75)}),
    "phi3-longrope": ("Phi3", {"head_dim": 8, **LONGROPE}),
    "phi3-longrope-short": (
        "Phi3",
        {
            "head_dim": 8,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
            **LONGROPE_SHORT,
        },
    ),
    "olmo2": ("Olmo2", {"head_dim": 8, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-whole-heads": ("Glm4", {**rope("default", partial_rotary_factor=1.0), "attention_bias": False}),
    "granite": ("Granite", GRANITE),
    "granite-biases": (
        "Granite",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"head_dim": 8, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"head_dim": 8, "no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 4},
    ),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "head_dim": 8, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-mixed": (
        "Qwen2Moe",
        {
            **MOE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("Olmoe", {**MOE, "head_dim": None, "num_attention_heads": 4}),
    "olmoe-biases": (
        "Olmoe",
        {**MOE, "head_dim": 8, "num_key_value_heads": 6, "norm_topk_prob": True, "attention_bias": True},
    ),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "dots1": (
        "Dots1",
        {**SIGMOID_MOE, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1},
    ),
    "dots1-window": (
        "Dots1",
        {
            **SIGMOID_MOE,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 1,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 6}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "n_inner": 96,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2-untied": (
        "GPT2",
        {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 64, "tie_word_embeddings": False},
    ),
}
NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "Qwen2Moe", "Olmoe", "MiniMaxM2")
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def make_reference(case: str, folder: Path, **save: Any) -> Any:
    """Write the case's random checkpoint and return the transformers model that wrote it."""
    name, settings = CASES[case]
    base = {k: BASE[k] for k in ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")}
    merged = {**(base if name == "GPT2" else BASE), **settings}
    if merged.get("head_dim", 0) is None:
        del merged["head_dim"]
    config = getattr(transformers, name + "Config")(**{**merged, "attn_implementation": "eager"})
    torch.manual_seed(7)
    model = getattr(transformers, CLASSES.get(name, name + "ForCausalLM"))(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 1.0 if key.endswith("weight") and "Gemma" not in name else 0.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif "router" in key or key.endswith("gate.weight"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder, **save)
    return model


@torch.inference_mode()
def reference_logits(model: Any, row: list[int]) -> torch.Tensor:
    return model(torch.tensor([row]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def check(model: Any, folder: Path, count: int = 12) -> None:
    ours = load_model(folder)
    for row, logits in zip(ROWS, logits_of(ours, ROWS)):
        expected = reference_logits(model, row)
        assert expected.std() > 0.5, "the reference's logits are degenerate"
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(logits, logits_of(ours, [row])[0]), (
            "a row's logits depend on the rest of the batch"
        )
    for logits, last in zip(logits_of(ours, ROWS), last_logits(ours, ROWS)):
        assert torch.allclose(logits[-1], last, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert greedy(ours, ROWS[0], count) == reference_greedy(model, ROWS[0], count)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    check(make_reference(case, tmp_path), tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "gpt2"])
def test_sharded(case: str, tmp_path: Path) -> None:
    model = make_reference(case, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(model, tmp_path, count=2)


def test_old_spellings_of_config(tmp_path: Path) -> None:
    """Configs as transformers 4 wrote them give the same model."""
    model = make_reference("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, tmp_path, count=2)


def test_gpt2_without_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, file)
    check(model, tmp_path, count=2)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    model = make_reference("qwen3", tmp_path)
    logits = logits_of(load_model(tmp_path, torch.bfloat16), ROWS)[0]
    expected = reference_logits(model, ROWS[0])
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_gemma3_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_reference("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.vision_model.embeddings.patch_embedding.bias"] = torch.ones(3)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": config.pop("dtype"),
        "text_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check(model, tmp_path, count=2)


def test_float16_runs(tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path)
    logits = logits_of(load_model(tmp_path, torch.float16), ROWS)[0]
    expected = reference_logits(model, ROWS[0])
    assert (logits.float() - expected).abs().mean() < 0.01 * expected.abs().mean()


@pytest.mark.parametrize("name", [*NAMES, "Glm4Moe", "Gemma3Text", "GPT2"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_without_a_head(tmp_path: Path, name: str, tied: bool) -> None:
    """Checkpoints saved from the base class have other tensor names and no lm_head; hidden states are compared."""
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
    base = {key: BASE[key] for key in keys} | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    settings = {**(base if name == "GPT2" else BASE), "tie_word_embeddings": tied}
    settings |= {"Gemma3Text": GEMMA, "Olmoe": {"head_dim": 8}, "Glm4Moe": GLM4_MOE}.get(name, {})
    config = getattr(transformers, name + "Config")(**settings)
    torch.manual_seed(3)
    model = getattr(transformers, name + "Model")(config).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [name + "Model"]
    ours = load_model(tmp_path)
    assert ours.spec.has_head == tied
    with torch.inference_mode():
        found = ours(whole_batch(ROWS))
        expected = torch.cat([model(torch.tensor([row])).last_hidden_state[0] for row in ROWS])
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


# The spec's defaults for fields that a config.json omits, by the name of the field in transformers.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": lambda s: s.norm_eps,
    "layer_norm_epsilon": lambda s: s.norm_eps,
    "num_key_value_heads": lambda s: s.num_kv_heads,
    "tie_word_embeddings": lambda s: s.tie_embeddings,
    "sliding_window": lambda s: next(iter(set(s.windows) - {None}), None),
    "attention_bias": lambda s: s.o_bias,
    "mlp_bias": lambda s: s.mlp_bias,
    "num_local_experts": lambda s: s.moe.routing.num_experts,
    "num_experts_per_tok": lambda s: s.moe.routing.top_k,
    "moe_intermediate_size": lambda s: s.moe.intermediate_size,
    "norm_topk_prob": lambda s: s.moe.routing.renormalise,
    "final_logit_softcapping": lambda s: s.final_soft_cap,
    "query_pre_attn_scalar": lambda s: round(s.query_scale**-2),
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, "Gemma3Text", "GPT2"])
def test_what_a_config_leaves_out_is_the_default_of_transformers(name: str) -> None:
    config = getattr(transformers, name + "Config")()
    theirs = config.to_dict()
    theirs["sliding_window"] = theirs.get("sliding_window") or None  # Qwen2-MoE writes 0 for none
    sizes = {
        key: getattr(config, key)
        for key in SIZES
        if key in theirs or (name == "GPT2" and key.startswith("n_"))
    }
    spec = ModelSpec.from_config({"architectures": [CLASSES.get(name, name + "ForCausalLM")], **sizes})
    compared = {key: (found(spec), theirs[key]) for key, found in DEFAULTS.items() if key in theirs}
    assert len(compared) >= 2 and {key: pair for key, pair in compared.items() if pair[0] != pair[1]} == {}
    head_dim = theirs.get("head_dim") or config.hidden_size // config.num_attention_heads
    assert spec.head_dim == head_dim
    kind = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    activation = theirs.get("hidden_activation") or theirs.get("hidden_act") or theirs["activation_function"]
    assert spec.activation == kind.get(activation, activation)
    if name == "GPT2":
        assert spec.intermediate_size == 4 * config.n_embd
        return
    rope = theirs["rope_parameters"]
    assert spec.rope and spec.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    if name == "Gemma3Text":
        assert spec.local_rope and spec.local_rope.theta == rope["sliding_attention"]["rope_theta"]
        assert [window is None for window in spec.windows] == [
            k == "full_attention" for k in config.layer_types
        ]
