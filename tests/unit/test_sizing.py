"""How many pages fit, and what happens when the context does not."""

from __future__ import annotations

import pytest
import torch

from quire.config import EngineConfig
from quire.types import ConfigError
from quire.worker.sizing import size_kv

TOKEN = 2 * 4 * 2 * 64 * 2  # keys and values, layers, KV heads, head_dim, bytes


def size(budget_tokens: int, asked: int | None = None, **settings):
    config = EngineConfig(max_model_len=asked, **settings).resolved(0, 4096)
    return size_kv(config, asked, 4, 2, 64, torch.bfloat16, budget_tokens * TOKEN)


def test_paged() -> None:
    found = size(10_000)
    assert (found.num_blocks, found.block_size, found.block_bytes) == (625, 16, 16 * TOKEN)
    assert found.max_model_len == 4096


def test_no_more_than_is_of_use() -> None:
    found = size(10**9, max_num_seqs=2)
    assert found.num_blocks == 2 * 2 * 4096 // 16


def test_contiguous_has_one_page_per_request() -> None:
    found = size(10_000, kv_layout="contiguous")
    assert (found.num_blocks, found.block_size) == (2, 4096)


def test_no_cache_needs_one_layer_only() -> None:
    found = size(1024, kv_layout="none")
    assert (found.num_blocks, found.block_size, found.block_bytes) == (1, 4096, 4096 * TOKEN // 4)


def test_an_automatic_context_shrinks_to_what_fits() -> None:
    assert size(1000).max_model_len == 992
    assert size(1000, kv_layout="contiguous").max_model_len == 1000


def test_an_explicit_context_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 4000 needs .* MiB of KV cache"):
        size(1000, asked=4000)
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_cache_memory"):
        size(100)


def test_an_explicit_context_that_fits_exactly_is_kept() -> None:
    assert size(4000, asked=4000).max_model_len == 4000
    assert size(4096).max_model_len == 4096
