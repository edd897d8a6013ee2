"""Models on PyTorch's meta device, which replaces a GPU where there is none.

Its tensors have no values, so waiting for the device, or using a host tensor in a device computation, is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.base import ForwardBatch
from quire.layers.env import Env
from quire.models.checkpoint.checkpoint import DummyCheckpoint
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.parallel.ranks import Parallel

META = torch.device("meta")
BASE: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**BASE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "Qwen2ForCausalLM": {**BASE, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": BASE,
    "Gemma3ForCausalLM": {**BASE, "final_logit_softcapping": 30.0},
    "MixtralForCausalLM": {**BASE, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {**BASE, **MOE},
    "GPT2LMHeadModel": {"vocab_size": 80, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32},
}


class ShapeOnly:
    name = "shape"
    forward_packed = None
    reads_shared = False

    def kv_shape(self, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
        return ()

    def plan(self, batch: Any) -> Any:
        return None

    def forward(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape == v.shape == (q.shape[0], layer.num_kv_heads, layer.head_dim)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return q.reshape(q.shape[0], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_step_never_waits_and_stays_on_the_device(name: str, dtype: torch.dtype) -> None:
    spec = ModelSpec.from_config({"architectures": [name], **CONFIGS[name]})
    spec = replace(spec, max_model_len=16)  # a shorter context than the model's
    model = build_model(spec, Env(DummyCheckpoint(0, META, dtype), Parallel(), ShapeOnly(), META, dtype))
    ids, rows = torch.zeros(6, dtype=torch.int64, device=META), np.array([4, 2], dtype=np.int32)
    ends = torch.zeros(3, dtype=torch.int32, device=META)
    batch = ForwardBatch(ids, ids, ids, ends, ends, ends, ids, ids, [], rows, rows, 16)
    with torch.inference_mode():
        hidden = model(batch)
        logits = model.logits(hidden[:3])
    assert hidden.shape == (6, 64) and logits.shape == (3, 80)
    assert hidden.device == logits.device == META
    assert hidden.dtype == logits.dtype == dtype
