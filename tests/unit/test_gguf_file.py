"""GGUF files: damaged ones give one sentence within bounded time and memory; split ones load like whole ones."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.models.checkpoint.checkpoint import open_checkpoint
from quire.models.config.gguf_file import open_gguf
from quire.models.config.load import load_spec
from quire.types import ModelError

HIDDEN, VOCAB = 32, 40
Q = gguf.GGMLQuantizationType
HOSTILE = (0, 1, 3, 255, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


def fill(writer: gguf.GGUFWriter) -> None:
    """Add the keys and tensors of a Llama model of one layer, with a vocabulary and one quantised matrix."""
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {number}" for number in range(VOCAB)])
    rng = np.random.default_rng(3)
    writer.add_tensor("token_embd.weight", rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32))
    half = rng.standard_normal((HIDDEN // 2, HIDDEN)).astype(np.float32)
    writer.add_tensor("blk.0.attn_k.weight", half)
    writer.add_tensor("blk.0.attn_v.weight", gguf.quants.quantize(half, Q.Q8_0), raw_dtype=Q.Q8_0)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HIDDEN, np.float32))


def written(path: Path, **options: int) -> list[Path]:
    """Write the model, and return its files."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    fill(writer)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob("*.gguf"))


def numbers(path: Path) -> dict[str, np.ndarray]:
    """Return some tensors of a file as the model gets them."""
    weights = open_checkpoint(path, load_spec(path))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        layer + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        layer + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        layer + "input_layernorm.weight": (HIDDEN,),
    }
    return {name: weights.tensor(name, shape).numpy() for name, shape in shapes.items()}


def damaged(data: bytes, header: int, rng: random.Random) -> bytes:
    """Return the file with another length, with changed bytes, or with a hostile number in its header."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    changed, at = bytearray(data), rng.randrange(4, header)
    if kind == 1:
        for place in rng.sample(range(header), rng.choice((1, 1, 4, 30))):
            changed[place] = rng.randrange(256)
    elif kind == 2:
        width, code = rng.choice(((8, "<Q"), (4, "<I")))
        changed[at : at + width] = struct.pack(code, rng.choice(HOSTILE) % (1 << 8 * width))
    else:
        piece = changed[at : at + rng.randrange(1, 40)]
        changed[at:at] = piece * rng.choice((1, 1, 50))
    return bytes(changed)


@pytest.mark.parametrize("part", range(3))
def test_damaged_bytes_give_one_sentence(tmp_path: Path, part: int) -> None:
    """No damage of a file raises anything but a ModelError, and none takes long or much memory."""
    (path,) = written(tmp_path / "model.gguf")
    data, rng = path.read_bytes(), random.Random(part)
    header = len(data) - sum(tensor.data.nbytes for tensor in open_gguf(path).tensors)
    assert numbers(path)["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    errors, start = 0, time.perf_counter()
    tracemalloc.start()
    for number in range(150):
        path = tmp_path / f"damaged-{number}.gguf"  # the file that a reader has mapped must not change
        path.write_bytes(damaged(data, header, rng))
        try:
            numbers(path)
        except ModelError as error:
            errors += 1
            assert len(str(error)) < 1200 and "\n" not in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert errors > 50 and peak < 64 << 20 and time.perf_counter() - start < 60


def entry(name: bytes, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ([entry(b"a", [])], "has 0 dimensions instead of 1 to 4"),
        ([entry(b"a", [1] * 5)], "has 5 dimensions"),
        ([entry(b"a", [4, 0])], r"has the dimensions \[4, 0\]"),
        ([entry(b"a", [1 << 63])], "has the dimensions"),
        ([entry(b"a", [1 << 39, 1 << 39])], "truncated or corrupt: tensor 'a' ends at byte"),
        ([entry(b"a", [4], kind=99)], "'a' has type 99"),
        ([entry(b"a", [33], kind=8)], "33 numbers, which is no multiple of the 32 of a Q8_0 block"),
        ([entry(b"a", [4], offset=1 << 60)], "truncated or corrupt"),
        ([entry(b"a", [2]), entry(b"a", [2])], "has the tensor 'a' more than once"),
    ],
)
def test_entries_of_tensors(tmp_path: Path, tensors: list[bytes], match: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(tensors) + bytes(64))
    with pytest.raises(ModelError, match=match) as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "x" * 5000)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'x.* is not supported yet; .*llama, .*qwen3next"):
        load_spec(tmp_path / "model.gguf")


def test_split_files_equal_whole_ones(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (whole,) = written(tmp_path / "whole" / "model.gguf")
    first, *others = parts = written(tmp_path / "model.gguf", split_max_tensors=4)
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert load_spec(first) == load_spec(whole)
    expected, found = numbers(whole), numbers(first)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    for part in others:
        with pytest.raises(ModelError, match="later part of a split GGUF file"):
            load_spec(part)
    renamed = first.with_name("first.gguf")
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"its name must end in -00001-of-00003\.gguf"):
        load_spec(renamed)
    others[0].write_bytes(others[1].read_bytes())
    with pytest.raises(ModelError, match="more than once"):
        load_spec(first)
    others[0].unlink()
    with pytest.raises(ModelError, match=r"part model-00002-of-00003\.gguf is missing"):
        load_spec(first)
