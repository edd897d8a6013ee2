"""Models with and without the kernels in their layers compute the same logits, for each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from golden.whole import WholeSequenceAttention, whole_batch
from quire.attention.base import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.decoder import Model
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel

pytest.importorskip("triton")
from quire.kernels import Kernels, fused, pick_kernels
from quire.kernels.cpu.ops import CpuKernels

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 12, "partial_rotary_factor": 0.5},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.75},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "logit_scale": 1.0,
    },
    "hunyuan": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "nemotron": {"architectures": ["NemotronForCausalLM"], "partial_rotary_factor": 0.5},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 5,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
    },
}
ROWS = [[5, 17, 3, 88, 42, 9, 61], [1, 60, 33]]


class WideCheckpoint(DummyCheckpoint):
    """Make weights so large that a wrong layer changes the logits."""

    STD = 0.3


def build(
    family: str,
    attention: AttentionBackend,
    device: torch.device,
    kernels: Kernels | None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    spec = ModelSpec.from_config({**BASE, **FAMILIES[family]})
    weights = WideCheckpoint(0, device, dtype)
    return build_model(spec, Env(weights, Parallel(), attention, device, dtype, kernels))


def logits_of(
    family: str,
    device: torch.device,
    kernels: Kernels | None,
    rows: list[list[int]] = ROWS,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    model = build(family, WholeSequenceAttention(), device, kernels, dtype)
    with torch.inference_mode(), device:
        return model.logits(model(whole_batch(rows))).float().cpu()


def paged_logits(
    family: str,
    attention: AttentionBackend,
    device: torch.device,
    kernels: Kernels | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Run the prompts of ROWS, then two single tokens, with blocks of 4 tokens."""
    model, spec = (
        build(family, attention, device, kernels, dtype),
        ModelSpec.from_config({**BASE, **FAMILIES[family]}),
    )
    blocks = torch.randperm(8, generator=torch.Generator().manual_seed(0)).view(2, 4).int()
    shape = attention.kv_shape(8, 4, spec.num_kv_heads, spec.head_dim)
    kv = [tuple(torch.zeros(shape, dtype=dtype) for _ in "kv") for _ in range(spec.num_layers)]
    outs, done = [], [0, 0]
    for step in (ROWS, [[7], [8]], [[9], [10]]):
        with torch.inference_mode(), device:
            batch = whole_batch(step)
            positions = torch.cat([torch.arange(old, old + len(row)) for old, row in zip(done, step)])
            row_of = torch.repeat_interleave(torch.arange(2), torch.tensor([len(row) for row in step]))
            batch.positions, batch.block_table, batch.block_size = positions, blocks.to(device).flip(0), 4
            batch.slots = torch.tensor([1, 0])
            batch.kv_slots = blocks.to(device)[row_of, positions // 4].long() * 4 + positions % 4
            done = [old + len(row) for old, row in zip(done, step)]
            batch.seq_lens, batch.seq_bounds = torch.tensor(done, dtype=torch.int32), np.array(done, np.int32)
            batch.kv = kv = [tuple(x.to(device) for x in layer) for layer in kv]
            batch.attn = attention.plan(batch)
            outs.append(model.logits(model(batch)).float().cpu())
    return torch.cat(outs)


on_either = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
        ),
    ],
)


@pytest.mark.parametrize("family", FAMILIES)
@on_either
def test_heads_that_go_packed_into_attention(family: str, device: str) -> None:
    from quire.attention.triton import TritonAttention

    where = torch.device(device)
    plain = paged_logits(family, ReferenceAttention(), where, None)
    packed = paged_logits(family, TritonAttention(), where, fused)
    assert plain.std() > 0.1 and not plain.isnan().any()
    torch.testing.assert_close(packed, plain, rtol=1e-3, atol=1e-3 * float(plain.std()))


@pytest.mark.parametrize("family", FAMILIES)
@on_either
def test_the_kernels_change_nothing(family: str, device: str) -> None:
    plain, with_kernels = (logits_of(family, torch.device(device), kernels) for kernels in (None, fused))
    assert plain.std() > 0.1 and not plain.isnan().any()
    torch.testing.assert_close(with_kernels, plain, rtol=1e-3, atol=1e-3 * float(plain.std()))


@pytest.mark.parametrize("family", FAMILIES)
@on_either
def test_few_rows_change_nothing(family: str, device: str) -> None:
    """In half precision, where few rows use special kernels, logits are as close to fp32 as those of plain torch.

    The interpreter is slow, so there one half of the families has one row, and the other half three.
    """
    counts = (1, 3) if device == "cuda" else (1 + 2 * (list(FAMILIES).index(family) % 2),)
    for count in counts:
        few_rows_change_nothing(family, count, device)


def few_rows_change_nothing(family: str, count: int, device: str) -> None:
    rows = [[token] for token in ROWS[0][:count]]
    right = logits_of(family, torch.device(device), None, rows)
    plain, few = (
        logits_of(family, torch.device(device), kernels, rows, torch.float16) for kernels in (None, fused)
    )
    assert right.std() > 0.1 and not few.isnan().any()
    assert (few - right).norm() <= 1.5 * (plain - right).norm() + 1e-3 * right.norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_a_cpu_change_nothing(family: str, dtype: torch.dtype) -> None:
    from quire.attention.cpu import CpuAttention

    cpu = torch.device("cpu")
    kernels = pick_kernels(cpu, dtype)
    if kernels is None:
        pytest.skip("no C compiler")
    assert isinstance(kernels, CpuKernels)
    right = paged_logits(family, ReferenceAttention(), cpu, None)
    plain = paged_logits(family, ReferenceAttention(), cpu, None, dtype)
    with_kernels = paged_logits(family, CpuAttention(kernels), cpu, kernels, dtype)
    assert right.std() > 0.1 and not with_kernels.isnan().any()
    assert (with_kernels - right).norm() <= 1.5 * (plain - right).norm() + 1e-5 * right.norm()
