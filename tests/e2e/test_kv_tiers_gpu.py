"""Blocks that leave a GPU for host memory and a disk, and come back: the tokens are those of an engine without tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PROMPTS = [[(7 * i + 3 * j) % 1500 + 300 for j in range(200 + 16 * i)] for i in range(8)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
BLOCK_BYTES = 16 * 2 * 7 * 2 * 64 * 4  # tokens, tensors, layers, K/V heads, dimensions, bytes
BLOCKS = 40  # of about 150 that the prompts take together


def answers(**settings: Any) -> tuple[list[Any], Any]:
    """Return the answers to the prompts, asked three times one after another, and the engine's totals."""
    with LLM(
        "demo", device="cuda", dtype="float32", max_model_len=512, max_num_seqs=2,
        kv_cache_memory=BLOCKS * BLOCK_BYTES, check_invariants=True, compile_processes=0, **settings,
    ) as llm:  # fmt: skip
        found = []
        for _ in range(3):
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        return found, llm.client.engine.log.totals


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"cuda_graphs": False}], ids=str)
def test_tiers_change_no_token(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = answers(**settings)
    for tiers in (
        {"kv_host_memory": 400 * BLOCK_BYTES / 1e9},
        {"kv_host_memory": 60 * BLOCK_BYTES / 1e9, "kv_disk": str(tmp_path / "blocks")},
    ):
        found, totals = answers(**settings, **tiers)
        assert found == plain
        assert totals.fetched_tokens.get("disk" if "kv_disk" in tiers else "host", 0) > 0
        assert totals.moved_bytes["save"] > 0 and totals.moved_bytes["load"] > 0
