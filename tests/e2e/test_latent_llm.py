"""A tiny DeepSeek-V3 in the whole engine: chunks, preemption, prefix hits and mixed batches give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.attention import expanded_reference
from quire.attention.expansion_rule import ExpansionRule

transformers = pytest.importorskip("transformers", reason="transformers makes the reference model")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "kv_lora_rank": 18, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "max_position_embeddings": 128, "initializer_range": 0.25,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
ENTRY_BYTES = 3 * (18 + 8) * 4  # of a token: layers, latent and rotated key, fp32
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SHARED = [(7 * i + 3) % 97 for i in range(24)]
PROMPTS = [SHARED + [5 + i] * (3 * i + 1) for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(7)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES)).eval()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            row = list(prompt)
            for _ in range(20):
                row.append(int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
            tokens.append(row[len(prompt) :])
    return tokens


def check_tokens(folder: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    with LLM(
        str(folder), max_model_len=64, skip_tokenizer_init=True, check_invariants=True, **settings
    ) as llm:
        for _ in range(2):  # the second time the prefix cache has all of it
            outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
            assert [out.outputs[0].token_ids for out in outs] == expected
        totals = llm.client.engine.log.totals
        assert bool(totals.preemptions) == ("kv_cache_memory" in settings)
        paged = settings.get("kv_layout", "paged") == "paged"
        assert bool(totals.cached_tokens) == paged
        info, layers = llm.client.info, 3 if settings.get("kv_layout") != "none" else 1
        assert info.block_bytes == info.block_size * ENTRY_BYTES * layers // 3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"kv_cache_memory": 18 * 4 * ENTRY_BYTES, "block_size": 4, "max_num_batched_tokens": 16},
        {"kv_layout": "contiguous", "overlap": False},
        {"kv_layout": "none"},
        {"attention": "reference", "cpu_kernels": False, "prefill_attention": "absorbed"},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(
    folder: Path, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    check_tokens(folder, expected, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"kv_cache_memory": 18 * 4 * ENTRY_BYTES, "block_size": 4, "max_num_batched_tokens": 16},
        {"kv_layout": "none", "prefill_attention": "expanded"},
        {"spec_method": "ngram", "max_num_batched_tokens": 11},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_which_rows_expand(
    folder: Path, expected: list[list[int]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, cached prefixes and drafts attend to expanded latents, in pieces of 5, beside rows that are absorbed."""
    pasts, mixed = [], []

    def rows(self: ExpansionRule, new: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = new > 1
        pasts.extend((lengths - new)[found].tolist())
        mixed.append(bool(found.any() and not found.all()))
        return found

    monkeypatch.setattr(ExpansionRule, "rows", rows)
    monkeypatch.setattr(expanded_reference, "_PIECE_NUMBERS", 1)
    monkeypatch.setattr(expanded_reference, "_LEAST_KEYS", 5)
    check_tokens(folder, expected, settings)
    assert any(mixed) == (settings.get("kv_layout") != "none")
    assert any(pasts) == (settings.get("kv_layout") != "none")
