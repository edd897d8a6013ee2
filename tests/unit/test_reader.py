"""The threaded reader: the same weights as without it, for every kind of request; errors; memory bounds."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import CONFIG, PartialRank, Recorder, env

import quire.models.checkpoint.reader as reader_module
from quire.models.checkpoint.reader import Reader
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.registry import build_model
from quire.models.spec import ModelSpec
from quire.types import ModelError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((7,), (301,), (1, 9), (40, 1), (33, 20), (6, 5, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a checkpoint of two files with every shape in every dtype."""
    folder = tmp_path_factory.mktemp("shards")
    generator = torch.Generator().manual_seed(0)
    for file, dtypes in (("a", DTYPES[::2]), ("b", DTYPES[1::2])):
        tensors = {
            name_of(shape, dtype): torch.randn(shape, generator=generator).to(dtype)
            for dtype in dtypes
            for shape in SHAPES
        }
        save_file(tensors, folder / f"{file}.safetensors")
    return folder


def name_of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))}.{dtype}"


def opened(folder: Path, device: str, threads: int = 3, piece_bytes: int = 100) -> SafetensorsCheckpoint:
    return SafetensorsCheckpoint(folder, False, Reader(torch.device(device), threads, piece_bytes))


def cut(rng: random.Random, size: int) -> slice:
    first = rng.randrange(size)
    return rng.choice((slice(None), slice(0, size), slice(first, rng.randrange(first, size) + 1)))


def place(rng: random.Random, shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Create a destination: a whole tensor, a part of a larger one, or a transposed one."""
    kind = rng.randrange(4 if len(shape) > 1 else 2)
    if kind == 0:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    if kind == 1:  # some rows of a fused weight
        return torch.zeros(shape[0] + 5, *shape[1:], dtype=dtype, device=device)[2:-3]
    if kind == 2:  # some columns of something wider
        return torch.zeros(shape[0], shape[1] + 3, *shape[2:], dtype=dtype, device=device)[:, 1:-2]
    return torch.zeros(shape[1], shape[0], *shape[2:], dtype=dtype, device=device).transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece_bytes", [50, 1000, 1 << 20])
def test_any_part_goes_anywhere_in_any_dtype(folder: Path, device: str, piece_bytes: int) -> None:
    rng = random.Random(piece_bytes)
    plain, threaded = SafetensorsCheckpoint(folder, False), opened(folder, device, 3, piece_bytes)
    copies = []
    for dtype in DTYPES:
        for shape in SHAPES:
            for _ in range(6):
                rows, cols = cut(rng, shape[0]), cut(rng, shape[1] if len(shape) > 1 else 1)
                wanted = plain.tensor(name_of(shape, dtype), shape, rows, cols)
                destination = place(rng, wanted.shape, rng.choice(DTYPES), device)
                threaded.copy_into(destination, name_of(shape, dtype), shape, rows, cols)
                copies.append((wanted, destination))
    threaded.finish()
    for wanted, destination in copies:
        assert torch.equal(destination.cpu(), wanted.to(destination.dtype))


class CopyRecorder(SafetensorsCheckpoint):
    """A checkpoint that records the copies it is asked for."""

    def copy_into(self, destination: torch.Tensor, name: str, *cut: Any) -> None:
        super().copy_into(destination, name, *cut)
        self.copies = [*getattr(self, "copies", []), (destination, name, *cut)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_models_get_their_weights(tmp_path: Path, architecture: str, rank: int, device: str) -> None:
    config: dict[str, Any] = {**CONFIG, "architectures": [architecture], "n_positions": 32}
    config |= {"n_embd": 16, "n_head": 4, "n_layer": 2}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    spec = ModelSpec.from_config(config)
    recorder = Recorder()
    build_model(spec, env(recorder))
    tensors = {name: tensor.bfloat16() for name, tensor in recorder.seen.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    threaded = CopyRecorder(tmp_path, spec.tie_embeddings, Reader(torch.device(device), 2, 64))
    build_model(spec, replace(env(threaded, PartialRank(rank, 2)), device=torch.device(device)))
    threaded.unread.clear()  # only the first rank reads a bias that is summed over ranks
    threaded.finish()
    plain = SafetensorsCheckpoint(tmp_path, spec.tie_embeddings)
    assert len(threaded.copies) > 8
    for destination, *asked in threaded.copies:
        assert torch.equal(destination.cpu(), plain.tensor(*asked).float())


# -------------------------------------------------------------------------------------------- errors


def test_what_the_header_shows_is_refused_at_once(folder: Path) -> None:
    weights, to = opened(folder, "cpu"), torch.empty(33, 20)
    with pytest.raises(ModelError, match=r"no tensor ghost \(expected shape \[33, 20\]\)"):
        weights.copy_into(to, "ghost", (33, 20))
    with pytest.raises(ModelError, match=r"has shape \[33, 20\], but the config asks for \[20, 33\]"):
        weights.copy_into(to, name_of((33, 20), torch.float32), (20, 33))
    weights.close()


def test_numbers_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="dtype I32"):
        opened(tmp_path, "cpu").copy_into(torch.empty(4), "x", (4,))


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_ends_early_is_named(tmp_path: Path, device: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(50, 50)}, file)
    weights = opened(tmp_path, device)
    with file.open("r+b") as changed:  # after it was opened and validated
        changed.truncate(file.stat().st_size - 300)
    weights.copy_into(torch.empty(50, 50, device=device), "x", (50, 50))
    with pytest.raises(
        ModelError, match=r"cannot read tensor x of .*model\.safetensors: the file ends \d+ bytes early"
    ):
        weights.finish()
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.ones(50, 50)}, tmp_path / "model.safetensors")
    weights = opened(tmp_path, "cpu")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read tensor x of .*model\.safetensors: .*No such file"):
        weights.copy_into(torch.empty(50, 50), "x", (50, 50))
    weights.close()


def test_tensors_that_nobody_asked_for_are_named(folder: Path) -> None:
    weights = opened(folder, "cpu")
    with pytest.raises(ModelError, match="does not use"):
        weights.finish()


# -------------------------------------------------------------------------------------------- bounds


def test_memory_is_bounded_by_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[reader_module.CopyLane] = []

    class Lane(reader_module.CopyLane):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            lanes.append(self)

    monkeypatch.setattr(reader_module, "CopyLane", Lane)
    values = torch.randn(1000, 100)
    save_file({"x": values}, tmp_path / "model.safetensors")
    weights = opened(tmp_path, "cpu", threads=3, piece_bytes=10_000)
    whole, part = torch.empty(1000, 100), torch.empty(1000, 7)
    weights.copy_into(whole, "x", (1000, 100))
    weights.copy_into(part, "x", (1000, 100), slice(None), slice(2, 9))
    weights.finish()
    assert torch.equal(whole, values) and torch.equal(part, values[:, 2:9])
    assert 1 <= len(lanes) <= 3
    assert all(lane.allocated_bytes == 10_000 for lane in lanes)


def test_closing_drops_what_has_not_begun(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1000, 100)}, tmp_path / "model.safetensors")
    weights = opened(tmp_path, "cpu", threads=1, piece_bytes=400)
    weights.copy_into(torch.empty(1000, 100), "x", (1000, 100))
    weights.close()
    weights.close()
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())
