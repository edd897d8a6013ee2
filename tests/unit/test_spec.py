"""`ModelSpec.from_config`: real configs of the supported families, old and new names, and rejections."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.layers.routing_params import Routing
from quire.models.config.load import load_spec
from quire.models.spec import ModelSpec
from quire.types import ModelError

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"
needs_configs = pytest.mark.skipif(
    not CONFIGS.is_dir(), reason="the shared configs (../shared/data) are absent"
)

# file: family, layers, hidden, heads, kv heads, head dim, intermediate, vocabulary, context, tied, rope, theta
EXPECTED = """
hf/Qwen--Qwen3-0.6B_config: qwen 28 1024 16 8 128 3072 151936 40960 1 default 1e6
hf/Qwen--Qwen3-1.7B_config: qwen 28 2048 16 8 128 6144 151936 40960 1 default 1e6
hf/Qwen--Qwen3-8B_config: qwen 36 4096 32 8 128 12288 151936 40960 0 default 1e6
hf/Qwen--Qwen3-32B_config: qwen 64 5120 64 8 128 25600 151936 40960 0 default 1e6
hf/Qwen--Qwen3-30B-A3B_config: moe 48 2048 32 4 128 6144 151936 40960 0 default 1e6
hf/Qwen--Qwen3-235B-A22B_config: moe 94 4096 64 4 128 12288 151936 40960 0 default 1e6
hf/Qwen--Qwen3-Coder-480B-A35B-Instruct_config: moe 62 6144 96 8 128 8192 151936 262144 0 default 1e7
hf/meta-llama--Meta-Llama-3.1-8B_config: llama 32 4096 32 8 128 14336 128256 131072 0 llama3 5e5
hf/meta-llama--Meta-Llama-3.1-70B_config: llama 80 8192 64 8 128 28672 128256 131072 0 llama3 5e5
hf/meta-llama--Meta-Llama-3.1-405B_config: llama 126 16384 128 8 128 53248 128256 131072 0 llama3 5e5
hf/mistralai--Mixtral-8x7B-v0.1_config: moe 32 4096 32 8 128 14336 32000 32768 0 default 1e6
hf/mistralai--Mixtral-8x22B-v0.1_config: moe 56 6144 48 8 128 16384 32000 65536 0 default 1e6
presets/Mixtral-8x7B-v0.1: moe 32 4096 32 8 128 14336 32000 32768 0 default 1e6
presets/gemma2_2b: gemma2 26 2304 8 4 256 9216 256000 8192 1 default 1e4
presets/gemma3_1b_it: gemma3 26 1152 4 1 256 6912 262144 32768 1 default 1e6
presets/deepseek_v2_lite: deepseek 27 2048 16 16 192 10944 102400 163840 0 yarn 1e4
presets/gpt2: gpt2 12 768 12 12 64 3072 50257 1024 1 - 0
presets/gpt2_medium: gpt2 24 1024 16 16 64 4096 50257 1024 1 - 0
presets/llama3_1_8b: llama 32 4096 32 8 128 14336 128256 131072 0 llama3 5e5
presets/llama3_1_70b: llama 80 8192 64 8 128 28672 128256 131072 0 llama3 5e5
presets/llama3_2_1b: llama 16 2048 32 8 64 8192 128256 131072 1 llama3 5e5
presets/llama3_2_3b: llama 28 3072 24 8 128 8192 128256 131072 1 llama3 5e5
presets/mistral_7b: llama 32 4096 32 8 128 14336 32000 32768 0 default 1e4
presets/mistral_7b_v03: llama 32 4096 32 8 128 14336 32768 32768 0 default 1e6
presets/qwen2: qwen 24 2048 16 16 128 5504 151936 4096 1 default 1e6
presets/qwen2_0_5b: qwen 24 896 14 2 64 4864 151936 32768 1 default 1e6
presets/qwen2_1_5b: qwen 28 1536 12 2 128 8960 151936 32768 1 default 1e6
presets/qwen2_7b: qwen 28 3584 28 4 128 18944 152064 32768 0 default 1e6
presets/qwen2.5_3b: qwen 36 2048 16 2 128 11008 151936 32768 1 default 1e6
presets/qwen2moe: moe 24 2048 16 16 128 5632 151936 32768 0 default 1e6
presets/qwen3_0.6b: qwen 28 1024 16 8 128 3072 151936 40960 1 default 1e6
presets/qwen3_1.7b: qwen 28 2048 16 8 128 6144 151936 40960 1 default 1e6
presets/smollm2_135m: llama 30 576 9 3 64 1536 49152 8192 1 default 1e5
presets/smollm2_360m: llama 32 960 15 5 64 2560 49152 8192 1 default 1e5
presets/tinyllama_1b_chat_v0.4: llama 22 2048 32 4 64 5632 32003 2048 0 default 1e4
presets/tinyllama_1b_chat_v1.0: llama 22 2048 32 4 64 5632 32000 2048 0 default 1e4
"""
TABLE = dict(line.split(": ") for line in EXPECTED.strip().splitlines())
REFUSED = {
    "presets/deepseek": "DeepseekForCausalLM",
}
QUANTISED = {
    "hf/deepseek-ai--DeepSeek-R1_config": ("fp8 (blocks of 128x128)", "dynamic"),
    "hf/deepseek-ai--DeepSeek-V3_config": ("fp8 (blocks of 128x128)", "dynamic"),
    "hf/Qwen--Qwen3-235B-A22B-FP8_config": ("fp8 (blocks of 128x128)", "dynamic"),
    "hf/Qwen--Qwen3-30B-A3B-FP8_config": ("fp8 (blocks of 128x128)", "dynamic"),
    "hf/Qwen--Qwen3-32B-FP8_config": ("fp8 (blocks of 128x128)", "dynamic"),
    "hf/Qwen--Qwen3-32B-FP8-Static-PerTensor_config": ("modelopt (FP8)", "static"),
    "hf/openai--gpt-oss-120b_config": ("mxfp4", "none"),
    "hf/openai--gpt-oss-20b_config": ("mxfp4", "none"),
}


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@needs_configs
@pytest.mark.parametrize("name", TABLE)
def test_supported(name: str) -> None:
    spec = ModelSpec.from_config(read(name))
    found = [spec.family, spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim]
    found += [spec.intermediate_size, spec.vocab_size, spec.max_model_len, int(spec.tie_embeddings)]
    family, *numbers, kind, theta = TABLE[name].split()
    assert found == [family, *(int(n) for n in numbers)]
    assert (spec.rope.kind if spec.rope else "-") == kind
    assert (spec.rope.theta if spec.rope else 0) == float(theta)
    spec.check_quantization()
    assert len(spec.windows) == spec.num_layers
    assert spec.dtype == ("float32" if "gpt2" in name or "v0.4" in name else "bfloat16")
    assert spec.eos_token_ids


@needs_configs
def test_every_config_is_accounted_for() -> None:
    files = {f"{f.parent.name}/{f.stem}" for f in CONFIGS.glob("*/*.json") if "hf_quant" not in f.name}
    assert files - {"hf/nvidia--Llama-3.1-70B-Instruct-FP8_config"} == {*TABLE, *REFUSED, *QUANTISED}


@needs_configs
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported(name: str) -> None:
    with pytest.raises(ModelError, match=f"{REFUSED[name]} is not supported"):
        ModelSpec.from_config(read(name))


@needs_configs
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_are_described(name: str) -> None:
    spec = ModelSpec.from_config(read(name))
    assert spec.num_kv_heads in (4, 8, 128) and spec.quantization is not None
    spec.check_quantization()
    described = (str(spec.quantization), spec.quantization.activations("model.layers.3.mlp.down_proj"))
    assert described == QUANTISED[name]


@needs_configs
def test_formats_that_cannot_be_read_are_refused_by_name() -> None:
    config = {**read("hf/Qwen--Qwen3-8B_config"), "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(ModelError, match="format hqq cannot be read: supported are: awq, compressed-tensors"):
        ModelSpec.from_config(config).check_quantization()


@needs_configs
@pytest.mark.parametrize(
    "name, billions, layers",
    [("presets/deepseek_v2_lite", 15.7, 27), ("hf/deepseek-ai--DeepSeek-V3_config", 671.0, 61)],
)
def test_deepseek(name: str, billions: float, layers: int) -> None:
    # The preset lacks V2-Lite's "q_lora_rank": null, whose default is not null.
    config = {"q_lora_rank": None, **read(name)}
    spec = ModelSpec.from_config(config)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert sum(layout.token_bytes for layout in spec.kv_layouts("bfloat16")) == 576 * 2 * layers
    assert spec.latent and spec.moe and (spec.latent.query_rank is None) == (layers == 27)
    assert spec.moe.sparse.index(True) == (1 if layers == 27 else 3)
    assert spec.moe.shared_size == (2816 if layers == 27 else 2048)
    scale = 0.1 * (0.707 if layers == 27 else 1.0) * math.log(40) + 1
    assert spec.query_scale == pytest.approx(192**-0.5 * scale**2)
    assert (
        spec.rope and spec.rope.attention_factor == 1.0 and spec.rope_dim(0) == 64 and spec.rope.interleaved
    )
    with pytest.raises(ModelError, match="moe_layer_freq 2 is not supported"):
        ModelSpec.from_config({**config, "moe_layer_freq": 2})
    with pytest.raises(ModelError, match="num_experts_per_tok must be at most"):
        ModelSpec.from_config({**config, "num_experts_per_tok": 300})


@needs_configs
def test_kimi_k2_is_deepseek_v3_with_other_numbers() -> None:
    config = read("hf/deepseek-ai--DeepSeek-V3_config")
    sizes = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_attention_heads": 64, "n_group": 1,
        "topk_group": 1, "n_routed_experts": 384, "vocab_size": 163840, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    }  # fmt: skip
    spec = ModelSpec.from_config({**config, **sizes})
    assert spec.num_parameters / 1e12 == pytest.approx(1.026, rel=0.01)
    assert spec == ModelSpec.from_config({**config, **sizes, "architectures": ["DeepseekV3ForCausalLM"]})


@needs_configs
def test_quantisation_described_in_a_file_of_its_own(tmp_path: Path) -> None:
    for kind in ("config", "hf_quant_config"):
        text = (CONFIGS / "hf" / f"nvidia--Llama-3.1-70B-Instruct-FP8_{kind}.json").read_text()
        (tmp_path / f"{kind}.json").write_text(text)
    spec = load_spec(tmp_path)
    assert spec.num_layers == 80 and str(spec.quantization) == "modelopt (FP8)"
    spec.check_quantization()


@needs_configs
def test_particulars() -> None:
    gemma = ModelSpec.from_config(read("presets/gemma3_1b_it"))
    assert gemma.windows == tuple(None if (i + 1) % 6 == 0 else 512 for i in range(26))
    assert gemma.local_rope and gemma.local_rope.theta == 10000
    assert gemma.query_scale == 256**-0.5 and gemma.embedding_scale == 1152**0.5
    assert gemma.activation == "gelu_tanh" and gemma.qk_norm and gemma.eos_token_ids == (1, 106)
    mistral = ModelSpec.from_config(read("presets/mistral_7b"))
    assert set(mistral.windows) == {4096}
    qwen2 = ModelSpec.from_config(read("presets/qwen2.5_3b"))
    assert set(qwen2.windows) == {None} and qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    moe = ModelSpec.from_config(read("hf/Qwen--Qwen3-30B-A3B_config")).moe
    assert moe and moe.routing == Routing(num_experts=128, top_k=8, renormalise=True)
    assert (moe.intermediate_size, moe.shared_size) == (768, 0)
    mixtral = ModelSpec.from_config(read("hf/mistralai--Mixtral-8x7B-v0.1_config")).moe
    assert mixtral and mixtral.routing == Routing(num_experts=8, top_k=2, renormalise=True)
    assert mixtral.intermediate_size == 14336
    qwen2_moe = ModelSpec.from_config(read("presets/qwen2moe"))
    assert qwen2_moe.moe and qwen2_moe.moe.routing == Routing(num_experts=60, top_k=4)
    assert (qwen2_moe.moe.shared_size, qwen2_moe.moe.shared_gate) == (5632, True)
    assert round(qwen2_moe.num_parameters / 1e9, 1) == 14.3
    llama = ModelSpec.from_config(read("presets/llama3_2_1b")).rope
    assert llama and (llama.factor, llama.low_freq_factor, llama.high_freq_factor) == (32, 1, 4)
    assert llama.original_max_len == 8192


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}


def llama(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes})


def test_absent_keys_mean_the_defaults() -> None:
    spec = llama(head_dim=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype, spec.tie_embeddings) == (8, 8, "float32", False)
    assert spec.rope and spec.rope.theta == 10000 and spec.eos_token_ids == ()
    assert llama(torch_dtype="bfloat16").dtype == llama(dtype="torch.bfloat16").dtype == "bfloat16"
    by_type = ModelSpec.from_config(
        {**{k: v for k, v in LLAMA.items() if k != "architectures"}, "model_type": "llama"}
    )
    assert by_type.family == "llama"


def test_rope_spellings_agree() -> None:
    numbers = {"factor": 4.0, "original_max_position_embeddings": 256}
    old = llama(rope_theta=7e3, rope_scaling={"type": "yarn", **numbers})
    new = llama(rope_parameters={"rope_type": "yarn", "rope_theta": 7e3, **numbers})
    assert old.rope == new.rope and old.rope is not None
    assert old.max_model_len == 1024 and old.rope.attention_factor == pytest.approx(1.1386294)
    assert llama(rope_scaling={"type": "linear", "factor": 4}).max_model_len == 4096
    assert llama(rope_scaling={"type": "dynamic", "factor": 4}).max_model_len == 1024


def test_gemma3_text_part_of_a_multimodal_config() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
    }
    spec = ModelSpec.from_config(
        {**config, "torch_dtype": "bfloat16", "model_type": "gemma3", "vision_config": {}}
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert (spec.dtype, spec.eos_token_ids, spec.max_model_len) == ("bfloat16", (1, 106), 131072)
    assert spec.rope and spec.rope.kind == "linear" and spec.rope.theta == 1e6
    assert spec.local_rope and spec.local_rope.kind == "default"
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    del text["rope_scaling"]
    again = ModelSpec.from_config({**config, "text_config": {**text, "rope_parameters": nested}})
    assert (again.rope, again.local_rope) == (spec.rope, spec.local_rope)


def test_qwen2_windows() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 3}
    config["num_key_value_heads"] = 8
    assert set(ModelSpec.from_config(config).windows) == {None}
    assert ModelSpec.from_config({**config, "use_sliding_window": True}).windows == (None, None, None, 16)
    kinds = ["sliding_attention", "full_attention"] * 2
    typed = ModelSpec.from_config({**config, "use_sliding_window": True, "layer_types": kinds})
    assert typed.windows == (16, None, 16, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DbrxForCausalLM"]}, "DbrxForCausalLM is not supported"),
        ({"architectures": []}, "names no architecture"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"hidden_size": 63}, "no head_dim"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "lacks short_factor"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be between 1 and"),
        ({"rope_scaling": "linear"}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial"),
        ({"rope_interleaved": True}, "interleaved"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
        (
            {"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_refusals_name_the_thing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama(**changes)


def test_load_spec_prefers_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert load_spec(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert load_spec(tmp_path).eos_token_ids == (7, 2, 9)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        load_spec(tmp_path)
    with pytest.raises(ModelError, match="holds no config"):
        load_spec(tmp_path / "..")
    with pytest.raises(ModelError, match="neither a folder"):
        load_spec(tmp_path / "nowhere")


def test_specs_need_no_torch() -> None:
    code = "import sys, quire.models.config.load; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
