"""Settings: defaults that depend on each other, errors that give the reason, flags generated from fields."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from quire.cli.flags import add_flags, given
from quire.config import EngineConfig
from quire.types import ConfigError, RequestError, SamplingParams


def test_defaults() -> None:
    c = EngineConfig().resolved(gpu_bytes=0, model_max_len=4096)
    assert (c.batching, c.kv_layout, c.block_size, c.eviction, c.scheduling_policy) == (
        "continuous", "paged", 16, "lru", "fcfs",
    )  # fmt: skip
    assert c.chunked_prefill and c.prefix_caching and c.overlap
    assert EngineConfig().resolved(24 * 10**9, 4096).max_num_seqs == 256
    assert EngineConfig().resolved(141 * 10**9, 4096).max_num_seqs == 1024


def test_no_kv_turns_off_what_needs_it() -> None:
    c = EngineConfig(kv_layout="none").resolved(0, 4096)
    assert not c.chunked_prefill and not c.prefix_caching
    assert c.block_size == 4096 and c.max_num_batched_tokens == 4096


def test_contiguous_is_one_block_as_long_as_the_context() -> None:
    assert EngineConfig(kv_layout="contiguous", max_model_len=100).resolved(0, 4096).block_size == 100


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_layout": "none", "chunked_prefill": True}, "chunked_prefill needs a KV cache"),
        ({"kv_layout": "none", "prefix_caching": True}, "prefix_caching needs a KV cache"),
        ({"batching": "dynamic"}, "batching must be one of continuous, static, got 'dynamic'"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be an integer"),
        ({"memory_utilization": 1.5}, r"memory_utilization must be in \(0, 1\], got 1.5"),
    ],
)
def test_illegal_settings_are_refused_with_the_reason(settings, text) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)


def test_whole_prompts_must_fit_into_a_step() -> None:
    config = EngineConfig(chunked_prefill=False, max_num_batched_tokens=100)
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens \(100\) must be at least max_model_len \(4096\)"
    ):
        config.resolved(0, 4096)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": -1}, r"temperature must be in \[0.0, 100.0\], got -1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": 0}, r"top_p must be in \(0.0, 1.0\], got 0"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"n": 0}, "n must be between 1 and"),
        ({"top_k": "many"}, "top_k must be an integer, got 'many'"),
        ({"min_tokens": 5, "max_tokens": 2}, r"min_tokens \(5\) must not exceed max_tokens \(2\)"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"logit_bias": {1: 1000}}, "logit_bias must map token ids to values"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one"),
    ],
)
def test_sampling_parameters_out_of_range(settings, text) -> None:
    with pytest.raises(RequestError, match=text) as error:
        SamplingParams(**settings)
    assert error.value.param == next(iter(settings))


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "sampling", SamplingParams)
    args = parser.parse_args(
        [
            "--kv-layout",
            "none",
            "--max_num_seqs",
            "4",
            "--kv-cache-memory",
            "2g",
            "--no-overlap",
            "--stop",
            "a",
            "--stop",
            "b",
            "--logit-bias",
            '{"5":1.5}',
            "--temperature",
            "0",
            "--seed",
            "3",
            "--sampling-seed",
            "4",
        ]
    )
    engine = EngineConfig(**given(args, EngineConfig))
    assert (engine.kv_layout, engine.max_num_seqs, engine.kv_cache_memory, engine.overlap) == (
        "none",
        4,
        2 << 30,
        False,
    )
    params = SamplingParams(**given(args, SamplingParams))
    assert params.stop == ["a", "b"] and params.logit_bias == {5: 1.5} and params.greedy
    assert (engine.seed, params.seed) == (3, 4)


def test_help_loads_nothing_heavy() -> None:
    """`quire --help` must answer at once, even on a slow machine."""
    command = [sys.executable, "-X", "importtime", "-m", "quire", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in out.stderr.splitlines()}
    assert "generate" in out.stdout and "quire" in loaded
    assert not loaded & {"torch", "triton", "tokenizers", "jinja2", "numpy", "tqdm", "msgspec"}
