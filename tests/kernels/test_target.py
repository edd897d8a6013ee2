"""The choices for each GPU: tiles, splits and dtypes, and the settings that it refuses."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("triton")

from targets import TARGETS, pretend

from quire.assembly.attention import pick_attention
from quire.assembly.device import pick_device, pick_dtype
from quire.kernels import target as targets
from quire.kernels.attention.long import long_tile
from quire.kernels.attention.shared import shared_tile
from quire.kernels.attention.short import num_splits, short_tile
from quire.kernels.matmul.gemv import programs_for, tile
from quire.kernels.target import Target
from quire.models.spec import ModelSpec
from quire.quant.few_rows import FewRowsMatmul
from quire.types import ConfigError
from tiny import CONFIG

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPEC = ModelSpec.from_config({**CONFIG, "dtype": "bfloat16"})
GEMMA = ModelSpec.from_config(
    {**CONFIG, "dtype": "bfloat16", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
)
HOPPER = TARGETS[90]


def on(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Make `target` the first GPU."""
    monkeypatch.setitem(targets.KNOWN_TARGETS, GPU, target)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


# --------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("dim", "itemsize", "long", "short", "shared"),
    [
        (64, 2, (128, 64, 8, 3, 128), (16, 128, 2, 5, None), (64, 64, 4, 3, None)),
        (128, 2, (128, 64, 8, 3, 128), (16, 64, 2, 5, None), (64, 64, 4, 3, None)),
        (256, 2, (128, 64, 8, 3, None), (16, 64, 4, 4, None), (64, 32, 4, 3, None)),
        (64, 4, (64, 32, 8, 2, None), (16, 64, 2, 5, None), (64, 64, 4, 3, None)),
        (128, 4, (64, 32, 8, 2, None), (16, 64, 4, 4, None), (64, 32, 4, 3, None)),
        (256, 4, (32, 32, 8, 2, None), (16, 16, 2, 5, None), (64, 32, 4, 3, None)),
    ],
)
def test_hopper_has_the_tiles_that_were_measured_on_it(
    dim: int, itemsize: int, long: object, short: object, shared: object
) -> None:
    for group in (1, 2, 4, 8):
        assert long_tile(dim, itemsize, group, HOPPER) == long
        assert short_tile(dim, itemsize, group, 8, HOPPER) == short
        assert shared_tile(dim, itemsize, group, HOPPER) == shared


def test_hopper_has_the_programs_that_were_measured_on_it() -> None:
    assert [short_tile(128, 2, 2, n, HOPPER).stages for n in (396, 397, 660, 661)] == [5, 4, 4, 5]
    assert short_tile(128, 2, 4, 2048, HOPPER, coded=True) == (16, 128, 4, 3, None)
    assert long_tile(128, 2, 4, HOPPER, coded=True) == (64, 128, 4, 2, None)
    splits = [num_splits(rows, 8, 4096, 128, 2, HOPPER) for rows in (1, 2, 4, 8, 16, 32, 33)]
    assert splits == [32, 16, 8, 4, 2, 2, 1]
    assert programs_for(HOPPER.sms) == 128
    assert tile(6144, 1024, HOPPER.sms, True, True) == (8, 1024, 1, 4)
    assert tile(1024, 3072, HOPPER.sms) == (4, 1024, 3, 4)
    assert tile(28672, 4096, HOPPER.sms, True, True, 1) == (16, 2048, 2, 8)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_target_has_tiles_that_fit(target: Target, dim: int, itemsize: int) -> None:
    from quire.attention.triton import TritonAttention

    assert all(TritonAttention.fits(dim, itemsize, group, target) for group in (1, 2, 7, 8, 16))
    assert target.has_matrix_units or long_tile(dim, itemsize, 1, target).rows <= 32


def test_without_matrix_units_the_library_multiplies_several_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(64, 128, dtype=torch.float16)
    assert FewRowsMatmul(weight, None).most_rows == 16
    pretend(monkeypatch, CPU, capability=75)
    targets.log_choice.cache_clear()
    assert FewRowsMatmul(weight, None).most_rows == FewRowsMatmul(weight, None).fused_rows == 2
    assert len(caplog.records) == 1 and "products of few rows by PyTorch" in caplog.text


# ------------------------------------------------------------------------------------------- choices


def test_attention_falls_back_where_heads_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wide = ModelSpec.from_config({**CONFIG, "head_dim": 1024})
    on(monkeypatch, TARGETS[89])
    assert pick_attention("auto", SPEC, GPU, torch.float32, None).name == "triton"
    assert not caplog.records
    assert pick_attention("auto", wide, GPU, torch.float32, None).name == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "using attention reference, which is slower: 32-bit heads of 1024 need more shared memory than RTX 4090 "
        "(compute capability 8.9) has"
    ]
    with pytest.raises(ConfigError, match="attention triton cannot run: 32-bit heads of 1024"):
        pick_attention("triton", wide, GPU, torch.float32, None)


def test_auto_takes_a_format_that_the_gpu_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, TARGETS[75])
    with caplog.at_level(logging.WARNING):
        assert pick_dtype("auto", SPEC, GPU) == torch.float16
        assert pick_dtype("auto", GEMMA, GPU) == torch.float32
    assert [record.getMessage() for record in caplog.records] == [
        "using dtype float16, because T4 (compute capability 7.5) has no bfloat16",
        "using dtype float32, because T4 (compute capability 7.5) has no bfloat16",
    ]
    with pytest.raises(ConfigError, match=r"dtype bfloat16 needs .* got T4 .*; use dtype float16"):
        pick_dtype("bfloat16", SPEC, GPU)
    assert pick_dtype("float32", SPEC, GPU) == torch.float32


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_auto_follows_the_checkpoint_since_ampere(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, TARGETS[capability])
    assert pick_device("auto") == GPU
    assert pick_dtype("auto", SPEC, GPU) == pick_dtype("bfloat16", GEMMA, GPU) == torch.bfloat16


def test_models_of_a_wide_range_warn_in_float16(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_dtype("float16", GEMMA, GPU) == torch.float16
    assert "gemma3 models exceed the range of float16" in caplog.text


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, Target("Tesla V100", 70, 98_304, 80))
    with pytest.raises(
        ConfigError, match=r"Tesla V100 \(compute capability 7.0\) is too old: .* 7.5 or later"
    ):
        pick_device("cuda")


def test_amd_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, TARGETS[90])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match=r"'cuda:0' is an AMD GPU .ROCm 6.4., which Quire does not support"):
        pick_device("auto")


@pytest.mark.gpu
def test_the_gpu_here_says_what_it_is() -> None:
    target = targets.target_of(torch.device("cuda", 0))
    assert (10 * torch.cuda.get_device_capability(0)[0]) <= target.capability
    assert target.sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert target.shared_bytes == TARGETS[target.capability].shared_bytes
