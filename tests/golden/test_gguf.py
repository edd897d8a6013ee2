"""GGUF files against safetensors. The tests write the files in the layout of llama.cpp's converter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from whole import load_model, logits_of

transformers = pytest.importorskip("transformers", reason="transformers makes the reference models")
from gguf_parts import check_without_parts  # noqa: E402
from test_families import BASE, CASES, ROWS, make_reference, reference_logits, rope  # noqa: E402

from quire.layers.rope import inverse_frequencies  # noqa: E402
from quire.layers.rope_params import RopeParams  # noqa: E402
from quire.models.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from quire.models.checkpoint.gguf_changes import OFFSET_NORMS, REORDERED  # noqa: E402
from quire.models.config.gguf_families import TRANSLATIONS  # noqa: E402
from quire.models.config.load import load_spec  # noqa: E402
from quire.types import ModelError  # noqa: E402

torch.set_num_threads(1)
Q = gguf.GGMLQuantizationType
ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3vl": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3vlmoe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    **{name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name in TRANSLATIONS},
}
CASES["gguf-wide"] = (
    "Llama",
    {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8},
)
CASES["gguf-gemma3"] = (
    "Gemma3Text",
    {**CASES["gemma3"][1], "query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7},
)


CAPS = [
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
]
SCALES = [
    ("attention_scale", "attention_multiplier"), ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"), ("logit_scale", "logits_scaling"),
]  # fmt: skip


def write_metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_context_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_eos_token_id(2)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    width = config.intermediate_size
    if arch == "lfm2":  # the adjusted width of its MLPs
        width = -(-int(2 * width / 3) // config.block_multiple_of) * config.block_multiple_of
    writer.add_feed_forward_length(width)
    if "vl" in arch:
        writer.add_rope_dimension_sections([2, 2, 2, 0])  # of images; the positions of text are equal
    if arch in NEW_EXPERTS:
        write_experts(writer, arch, config)
    if arch.startswith("lfm2"):
        kinds = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * kind for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif arch != "deepseek2":
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("norm_epsilon", "norm_eps", "layer_norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "deepseek2":
        write_latent(writer, config)
    else:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        factor = 1 + math.log(64 / 4) / math.log(4)
        writer.add_rope_scaling_attn_factors(factor**0.5)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None) and arch not in ("qwen2", "dots1"):
        writer.add_sliding_window(config.sliding_window)
    if part := rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(dim * part))
    for key, name in (*CAPS, *(SCALES if arch == "granite" else [("logit_scale", "logit_scale")])):
        if (value := getattr(config, name, None)) is not None:
            getattr(writer, f"add_{key}")(value)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and arch not in NEW_EXPERTS:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch in ("qwen3moe", "qwen3vlmoe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


NEW_EXPERTS = (
    "deepseek2", "dots1", "ernie4_5-moe", "glm4moe", "hunyuan-moe", "lfm2moe", "olmoe", "qwen2moe",
)  # fmt: skip


def write_experts(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """Write the metadata of experts as the converters of these architectures do."""

    def first(*names: str) -> Any:
        value = next(
            (getattr(config, name) for name in names if getattr(config, name, None) is not None), None
        )
        return value[0] if isinstance(value, list) else value

    writer.add_expert_count(first("n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts"))
    writer.add_expert_used_count(first("moe_k", "moe_topk", "num_experts_per_tok"))
    if width := first("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if (count := first("n_shared_experts", "moe_num_shared_experts")) is not None:
        writer.add_expert_shared_count(count)
    if width := first("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    if (dense := first("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")) is not None:
        writer.add_leading_dense_block_count(dense)
    if every := first("moe_layer_interval"):
        writer.add_interleave_moe_layer_step(every)
    if (scale := first("routed_scaling_factor")) is not None:
        writer.add_expert_weights_scale(scale)
    if arch in ("deepseek2", "dots1", "glm4moe", "lfm2moe"):
        writer.add_expert_weights_norm(bool(first("norm_topk_prob")) and config.model_type != "deepseek_v2")
        sigmoid = config.model_type != "deepseek_v2"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
    if (groups := first("n_group")) and getattr(config, "topk_method", "noaux_tc") != "greedy":
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config.topk_group)


def write_latent(writer: gguf.GGUFWriter, config: Any) -> None:
    rotary, rank = config.qk_rope_head_dim, config.kv_lora_rank
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    whole = config.qk_nope_head_dim + rotary
    if getattr(config, "old_gguf", False):
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(whole)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(whole)
        writer.add_value_length_mla(config.v_head_dim)
    if weight := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def converted_latent(name: str, value: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Return the two parts of kv_b_proj, one matrix per head."""
    heads, content = config.num_attention_heads, config.qk_nope_head_dim
    whole = value.reshape(heads, content + config.v_head_dim, config.kv_lora_rank)
    block = f"blk.{name.split('.')[2]}."
    return {
        block + "attn_k_b.weight": whole[:, :content].swapaxes(1, 2),
        block + "attn_v_b.weight": whole[:, content:],
    }


def converted(arch: str, tensors: dict[str, torch.Tensor], config: Any) -> dict[str, np.ndarray]:
    """Return the tensors by their GGUF names, with the changes that the converter makes."""
    names = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        value = tensor.float().numpy()
        if arch in REORDERED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            pairs = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        if arch in OFFSET_NORMS and name.endswith("norm.weight"):
            value = value + 1
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.T
        if arch == "gpt-oss" and (".experts." in name or name.endswith(".sinks")):
            out.update(converted_gpt_oss(name, value))
            continue
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, which, _ = tail.split(".")
            which = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(which, which)
            layer = head.split(".")[2]
            stack = f"blk.{layer}.ffn_{which.removesuffix('_proj')}_exps.weight"
            stacks.setdefault(stack, {})[int(number)] = value
            continue
        if name.endswith("kv_b_proj.weight") and not getattr(config, "old_gguf", False):
            out.update(converted_latent(name, value, config))
            continue
        if name.endswith("conv.conv.weight"):
            value = value[:, 0]
        if name.endswith("e_score_correction_bias"):
            name, value = name.replace("_bias", ".bias"), value.reshape(-1)
        name = name.replace(".expert_bias", ".expert_bias.bias")
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        out[theirs] = value
    for stack, values in stacks.items():
        out[stack] = np.stack([values[i] for i in range(len(values))])
    return out


def converted_gpt_oss(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Return sinks with a suffix, and experts with rows as outputs and gate and up apart."""
    block = f"blk.{name.split('.')[2]}."
    if name.endswith(".sinks"):
        return {block + "attn_sinks.weight": value}
    kind = "bias" if name.endswith("_bias") else "weight"
    value = value if kind == "bias" else value.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{block}ffn_down_exps.{kind}": value}
    return {f"{block}ffn_{part}_exps.{kind}": value[:, odd::2] for odd, part in enumerate(("gate", "up"))}


# What llama.cpp has in its code is not in a file: the place of windows and of layers without rotation.
CASES["gguf-gemma2"] = ("Gemma2", {**CASES["gemma2"][1], "query_pre_attn_scalar": 16})
CASES["gguf-cohere2"] = (
    "Cohere2",
    {**CASES["cohere2"][1], "sliding_window_pattern": 4, "num_hidden_layers": 4},
)
CASES["gguf-exaone4"] = (
    "Exaone4",
    {**CASES["exaone4"][1], "sliding_window_pattern": 4, "num_hidden_layers": 4},
)
# A file has one of YaRN's two mscale; published models have the same value for both.
SAME_MSCALE = rope("yarn", factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)
CASES["gguf-deepseek-v3"] = ("DeepseekV3", {**CASES["deepseek-v3"][1], **SAME_MSCALE})
CASES["gguf-smollm3"] = ("SmolLM3", {"head_dim": 8, "num_hidden_layers": 4})
CASES["gguf-starcoder2"] = ("Starcoder2", {"head_dim": 8, "intermediate_size": 64})


def write_gguf(
    folder: Path,
    arch: str,
    config: Any,
    kind: Q = Q.F32,
    extra: dict[str, np.ndarray] | None = None,
    quantise: Callable[[np.ndarray, Q], np.ndarray] | None = None,
) -> Path:
    """Write a file; matrices are quantised, or with `quantise`, which packs them, only those of experts."""
    path = folder / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, arch, config)
    tensors = converted(arch, load_file(folder / "model.safetensors"), config)
    for name, value in {**tensors, **(extra or {})}.items():
        value = np.ascontiguousarray(value)
        if value.ndim < 2 or kind == Q.F32 or (quantise and not name.endswith("_exps.weight")):
            writer.add_tensor(name, value)
        elif quantise:
            writer.add_tensor(name, quantise(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("llama", "llama"),
        ("llama", "llama-biases"),
        ("llama", "mixtral"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3-tied-yarn"),
        ("qwen3moe", "qwen3-moe"),
        ("qwen2vl", "qwen2"),
        ("qwen3vl", "qwen3"),
        ("qwen3vlmoe", "qwen3-moe"),
        ("gemma3", "gguf-gemma3"),
        ("gpt2", "gpt2"),
        ("gpt2", "gpt2-untied"),
        ("arcee", "arcee"),
        ("cohere2", "gguf-cohere2"),
        ("command-r", "cohere"),
        ("deepseek2", "deepseek-v2"),
        ("deepseek2", "deepseek-v2-groups"),
        ("deepseek2", "deepseek-v2-dense-lora"),
        ("deepseek2", "gguf-deepseek-v3"),
        ("deepseek2", "deepseek-v3-old-file"),
        ("deepseek2", "deepseek-v3-no-groups"),
        ("dots1", "dots1"),
        ("ernie4_5-moe", "ernie4-5-moe"),
        ("glm4moe", "glm4-moe"),
        ("glm4moe", "glm4-moe-groups"),
        ("hunyuan-moe", "hunyuan-moe"),
        ("lfm2", "lfm2"),
        ("lfm2moe", "lfm2-moe"),
        ("olmoe", "olmoe"),
        ("qwen2moe", "qwen2-moe"),
        ("ernie4_5", "ernie4-5"),
        ("exaone4", "gguf-exaone4"),
        ("gemma", "gemma"),
        ("gemma2", "gguf-gemma2"),
        ("chatglm", "glm"),
        ("glm4", "glm4"),
        ("gpt-oss", "gpt-oss"),
        ("granite", "granite"),
        ("hunyuan-dense", "hunyuan-dense-plain"),
        ("nemotron", "nemotron"),
        ("olmo2", "olmo2"),
        ("phi3", "phi3-partial"),
        ("phi3", "phi3-longrope"),
        ("seed_oss", "seed-oss"),
        ("smollm3", "gguf-smollm3"),
        ("starcoder2", "gguf-starcoder2"),
    ],
)
def test_f32_equals_transformers(
    arch: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "llama-biases":
        CASES["gguf-biases"] = ("Llama", {"attention_bias": True, "mlp_bias": True})
        case = "gguf-biases"
    is_old = case == "deepseek-v3-old-file"  # with kv_b_proj as one matrix
    model = make_reference("gguf-deepseek-v3" if is_old else case, tmp_path)
    model.config.old_gguf = is_old
    if case == "gpt2-untied":
        model.config.n_inner = 4 * model.config.n_embd
    extra = {}
    if case == "phi3-longrope":
        rope = model.config.rope_parameters
        extra = {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
            for name in ("short", "long")
        }
    path = write_gguf(tmp_path, arch, model.config, extra=extra)
    ours = load_model(path)
    for row, logits in zip(ROWS, logits_of(ours, ROWS)):
        expected = reference_logits(model, row)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    check_without_parts(path, monkeypatch)


def test_llama3_rope_divisors(tmp_path: Path) -> None:
    """The converter stores Llama 3.1's rule as a tensor of divisors."""
    model = make_reference("llama-llama3", tmp_path)
    params = RopeParams(theta=500.0, kind="llama3", factor=4.0, original_max_len=16)
    plain = RopeParams(theta=500.0)
    divisors = (inverse_frequencies(plain, 12) / inverse_frequencies(params, 12)).numpy()
    path = write_gguf(tmp_path, "llama", model.config, extra={"rope_freqs.weight": divisors})
    expected = reference_logits(model, ROWS[0])
    assert (logits_of(load_model(path), ROWS)[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0])
def test_packed_kinds(kind: Q, tmp_path: Path) -> None:
    """Logits equal those of the reference with the same rounded weights."""
    model = make_reference("gguf-wide", tmp_path)
    path = write_gguf(tmp_path, "llama", model.config, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                packed = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(
                    torch.from_numpy(np.array(gguf.quants.dequantize(packed, kind), dtype=np.float32))
                )
    expected = reference_logits(model, ROWS[0])
    logits = logits_of(load_model(path), ROWS)[0]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert load_spec(path).dtype == {Q.F16: "float16"}.get(kind, "bfloat16")


@pytest.mark.parametrize("kind", [Q.MXFP4, Q.Q8_0])
def test_packed_experts_of_gpt_oss(kind: Q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with biases stay packed, and their numbers are those that the blocks stand for."""
    sizes = {**CASES["gpt-oss"][1], "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    monkeypatch.setitem(CASES, "gguf-gpt-oss", ("GptOss", sizes))
    model = make_reference("gguf-gpt-oss", tmp_path)
    experts = [p for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    packed: dict[bytes, np.ndarray] = {}

    def quantise(values: np.ndarray, wanted: Q) -> np.ndarray:
        assert wanted == kind
        return packed[np.ascontiguousarray(values).tobytes()]

    with torch.no_grad():
        for parameter in experts:
            rows = np.ascontiguousarray(parameter.numpy().swapaxes(1, 2))
            numbers = gguf.quants.dequantize(blocks := blocks_of(rows, kind), kind).reshape(rows.shape)
            parameter.copy_(torch.from_numpy(numbers).swapaxes(1, 2))
            parts = (
                [slice(0, None, 2), slice(1, None, 2)]
                if rows.shape[1] == 64 == rows.shape[2]
                else [slice(None)]
            )
            for part in parts:
                packed[np.ascontiguousarray(numbers[:, part]).tobytes()] = np.ascontiguousarray(
                    blocks[:, part]
                )
    model.save_pretrained(tmp_path)
    path = write_gguf(tmp_path, "gpt-oss", model.config, kind, quantise=quantise)
    expected = reference_logits(model, ROWS[0])
    logits = logits_of(load_model(path, torch.float32), ROWS)[0]
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    stored = open_checkpoint(path, load_spec(path)).stored("model.layers.0.mlp.experts.1.up_proj.weight")
    assert stored and stored.kind == kind.name


def blocks_of(rows: np.ndarray, kind: Q) -> np.ndarray:
    """Return blocks of `kind` for [..., inputs]: of its packer, or random ones of MXFP4, which has none."""
    if kind != Q.MXFP4:
        return gguf.quants.quantize(rows, kind)
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (*rows.shape[:-1], rows.shape[-1] // 32, 17), dtype=np.uint8)
    blocks[..., 0] = rng.integers(122, 126, blocks.shape[:-1])
    return blocks.reshape(*rows.shape[:-1], -1)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K, Q.Q5_K])
def test_k_quants_are_unpacked(kind: Q, tmp_path: Path) -> None:
    """No packer for these formats is available, so blocks are random: q rows are dequantised and reordered."""
    model = make_reference("gguf-wide", tmp_path)
    heads, size, hidden = 8, 256, 256
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 112, (size, hidden // block * width), dtype=np.uint8)
    values = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(values).all()  # bytes below 112 keep the fp16 scales finite
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, "llama", model.config)
    writer.add_tensor("token_embd.weight", np.zeros((97, 256), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_v.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = open_checkpoint(path, load_spec(path))
    rows = slice(32, 64)
    v = weights.tensor("model.layers.0.self_attn.v_proj.weight", (size, hidden), rows)
    q = weights.tensor("model.layers.0.self_attn.q_proj.weight", (size, hidden), rows)
    restored = values.reshape(heads, size // heads // 2, 2, hidden).swapaxes(1, 2).reshape(size, hidden)
    assert np.array_equal(v.numpy(), values[32:64])
    assert np.array_equal(q.numpy(), restored[32:64])


def test_damaged_and_unsupported(tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path)
    path = write_gguf(tmp_path, "llama", model.config)
    whole = path.read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 2, len(whole) - 100):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            load_spec(cut)
    with pytest.raises(ModelError, match="does not exist"):
        load_spec(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "rwkv6")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="rwkv6"):
        load_spec(other)


def test_unused_and_missing_tensors(tmp_path: Path) -> None:
    model = make_reference("llama", tmp_path)
    path = write_gguf(
        tmp_path, "llama", model.config, extra={"blk.0.attn_sinks.weight": np.zeros(6, np.float32)}
    )
    with pytest.raises(ModelError, match="attn_sinks"):
        load_model(path)
    weights = open_checkpoint(path, load_spec(path))
    with pytest.raises(ModelError, match=r"attn_q_norm.*q_norm"):
        weights.tensor("model.layers.0.self_attn.q_norm.weight", (BASE["head_dim"],))
    with pytest.raises(ModelError, match=r"token|embed.*\[97, 48\].*\[1, 48\]"):
        weights.tensor("model.embed_tokens.weight", (1, 48))
