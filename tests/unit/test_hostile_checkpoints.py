"""Malicious checkpoints: each is rejected quickly, with one sentence that names the problem."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.files.gguf_header import read_gguf_metadata
from quire.frontend.tokenizer.tokenizer import load_tokenizer
from quire.layers.rope import inverse_frequencies
from quire.models.checkpoint.checkpoint import open_checkpoint
from quire.models.config.load import load_spec
from quire.models.spec import ModelSpec
from quire.types import ModelError
from tiny import CONFIG, write_tiny

HUGE = 10**18
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def one_sentence(error: ModelError) -> None:
    assert len(str(error)) < 600 and "\n" not in str(error)


def refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        ModelSpec.from_config(config)
    one_sentence(caught.value)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": 5}, "architectures must be a list"),
        ({"architectures": [5]}, "architectures must be a list"),
        ({"architectures": [], "model_type": {}}, "model_type must be a string"),
        ({"architectures": ["x" * 100_000]}, "is not supported"),
        ({"num_hidden_layers": HUGE}, f"num_hidden_layers must be at most 4096, got {HUGE}"),
        ({"num_hidden_layers": 1e18}, "num_hidden_layers must be at most"),
        ({"max_position_embeddings": HUGE}, "max_position_embeddings must be at most"),
        ({"vocab_size": HUGE}, "vocab_size must be at most"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "factor must be between 1 and"),
        ({"rope_scaling": {**YARN, "factor": math.inf}}, "factor must be between 1 and"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast must be between"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4.0}},
            "high_freq_factor must be",
        ),
        ({"rope_theta": math.nan}, "rope_theta must be between 1 and 1e.15, got nan"),
        ({"rope_theta": 0}, "rope_theta must be between"),
        ({"rope_theta": -1e4}, "rope_theta must be between"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be between"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be between"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be between"),
        ({"eos_token_id": HUGE}, f"eos_token_id must hold token ids below vocab_size 260, got {HUGE}"),
        ({"eos_token_id": 1e18}, "eos_token_id must hold token ids"),
        ({"eos_token_id": -1}, "eos_token_id must hold token ids"),
        ({"eos_token_id": [1] * 300}, "at most 256 token ids"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"quantization_config": [1]}, "quantization_config must be an object"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"layer_types": [[]]}, "layer_types must be a list of str"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
    ],
)
def test_fields_of_a_config(changes: dict[str, Any], match: str) -> None:
    refused({**CONFIG, **changes}, match)


HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, HUGE, -HUGE, 10**400, 0.5, 1e18, 1e308, 1e-320, -0.0, math.nan, math.inf,
    "", "x", "9" * 10_000, "\ud800", [], [[]], [1], ["x"], {}, {"a": {"a": {}}}, {"rope_type": 5}, [None], list(range(300)),
]  # fmt: skip


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the path of every field, including those of nested objects."""
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def mutated(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def check_mutation(config: dict[str, Any]) -> None:
    """Check that a config gives either a spec with usable numbers, or a ModelError of one sentence."""
    try:
        spec = ModelSpec.from_config(config)
    except ModelError as error:
        one_sentence(error)
        return
    assert len(spec.windows) == spec.num_layers <= 4096 and spec.num_parameters > 0
    assert 0 < spec.norm_eps <= 1 and 0 < spec.query_scale < 1e6 and 0 < spec.max_model_len < 1 << 62
    for rope in filter(None, (spec.rope, spec.local_rope)):
        assert inverse_frequencies(rope, spec.head_dim).isfinite().all() and math.isfinite(
            rope.attention_factor
        )


def real_configs() -> list[dict[str, Any]]:
    files = sorted(CONFIGS.glob("*/*.json")) if CONFIGS.is_dir() else []
    return [CONFIG, *(json.loads(file.read_text()) for file in files)]


@pytest.mark.parametrize("part", range(4))
def test_any_value_in_any_field_is_a_spec_or_one_sentence(part: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(part)
    for config in real_configs()[part::4]:
        for path in places({**config, "rope_scaling": config.get("rope_scaling") or dict(YARN, factor=2.0)}):
            for value in rng.sample(HOSTILE, 9):
                check_mutation(mutated({"rope_scaling": dict(YARN, factor=2.0), **config}, path[:1], value)
                               if len(path) == 1 or not isinstance(config.get(path[0]), dict)
                               else mutated(config, path, value))  # fmt: skip


def test_many_changes_at_once_are_a_spec_or_one_sentence() -> None:
    rng, configs = random.Random(5), real_configs()
    for _ in range(1500):
        config = copy.deepcopy(rng.choice(configs))
        for _ in range(rng.choice([2, 3, 5])):
            config[rng.choice(list(config))] = rng.choice([*HOSTILE, 1, 2, 4, 8, 64, 1024])
        check_mutation(config)


# --------------------------------------------------------------------------------------------- files


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"eos_token_id": ' + b"9" * 6000 + b"}", "is not valid JSON"),
        (b'{"eos_token_id": 1' + b"0" * 18 + b', "vocab_size": 5}', "eos_token_id|names no architecture"),
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b" " * (17 << 20), "but the limit is 16777216"),
        (None, "is not a regular file"),
    ],
)
def test_files_of_json(folder: Path, name: str, content: bytes | None, match: str) -> None:
    if content is None:
        pipe(folder / name)
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=match) as caught:
        load_spec(folder)
    one_sentence(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard.safetensors"])
def test_weights_that_are_a_pipe(folder: Path, name: str) -> None:
    spec = load_spec(folder)
    if name == "shard.safetensors":
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    pipe(folder / name)
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        open_checkpoint(folder, spec)


def test_a_header_of_weights_that_is_too_long(folder: Path) -> None:
    spec, file = load_spec(folder), folder / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 200 << 20))
        opened.truncate(300 << 20)  # a sparse file
    with pytest.raises(ModelError, match="header of 209715200 bytes"):
        open_checkpoint(folder, spec)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
        "generation_config.json",
    ],
)  # fmt: skip
def test_files_of_a_tokenizer_that_are_pipes(folder: Path, name: str) -> None:
    pipe(folder / name)
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        load_tokenizer(folder)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


def test_a_tokenizer_that_is_too_large(folder: Path) -> None:
    original = (folder / "tokenizer.json").read_text()
    many = {f"token{i}": i for i in range(530_000)}
    for change, match in (
        (lambda c: c["model"].update(vocab=many), "530000 tokens in its vocabulary, but at most 524288"),
        (
            lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65_000}),
            "normalizer",
        ),
        (lambda c: c.update(normalizer=nested(40)), "normalizer is nested too deeply"),
        (
            lambda c: c.update(added_tokens=[{"id": i, "content": "x"} for i in range(50_000)]),
            "50000 added tokens",
        ),
    ):
        (folder / "tokenizer.json").write_text(original)
        changed(folder, change)
        with pytest.raises(ModelError, match=match) as caught:
            load_tokenizer(folder)
        one_sentence(caught.value)
    deep = original.replace('"normalizer":null', '"normalizer":' + '{"type":"Sequence","normalizers":[' * 65_000
                            + '{"type":"NFC"}' + "]}" * 65_000).replace('"normalizer": null', '"normalizer":'
                            + '{"type":"Sequence","normalizers":[' * 65_000 + "]}" * 65_000)  # fmt: skip
    (folder / "tokenizer.json").write_text(deep)
    with pytest.raises(ModelError, match="nested too deeply"):
        load_tokenizer(folder)


def test_odd_fields_of_a_tokenizer_config(folder: Path) -> None:
    for content in (
        {"tokenizer_class": 5, "added_tokens_decoder": {"²": {"content": "x"}, "9" * 5000: {"content": "y"}}},
        {
            "chat_template": [{"name": [], "template": "x"}, {"name": "a", "template": 5}],
            "eos_token": {"content": 3},
        },
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
        load_tokenizer(folder)


# ---------------------------------------------------------------------------------------------- GGUF


def gguf_file(path: Path, tensors: int, keys: int, rest: bytes = b"") -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest)
    return path


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("tensors", "keys", "rest", "match"),
    [
        (1 << 63, 0, b"", "9223372036854775808 tensors do not fit"),
        (0, 1 << 63, b"", "9223372036854775808 keys do not fit"),
        (300_000, 0, bytes(24 * 300_000), "300000 tensors, but the limit is 200000"),
        (0, 1, key(b"a", 9, struct.pack("<IQ", 0, 2_000_000) + bytes(2_000_000)), "2000000 values in an array"),
        (0, 1, key(b"a", 9, struct.pack("<IQ", 8, 1 << 62)), "do not fit"),
    ],
)  # fmt: skip
def test_counts_of_gguf_headers(tmp_path: Path, tensors: int, keys: int, rest: bytes, match: str) -> None:
    file = gguf_file(tmp_path / "model.gguf", tensors, keys, rest)
    for read in (load_spec, load_tokenizer, read_gguf_metadata):
        with pytest.raises(ModelError, match=match) as caught:
            read(file)
        one_sentence(caught.value)


def test_a_gguf_file_that_is_a_pipe(tmp_path: Path) -> None:
    pipe(tmp_path / "model.gguf")
    for read in (load_spec, load_tokenizer):
        with pytest.raises(ModelError, match="is not a regular file"):
            read(tmp_path / "model.gguf")
