"""The persistent kernel of decode steps against plain PyTorch: on fibers of a CPU (persistent_host.h), and on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.random_decoder import BLOCK, RandomDecoder

import quire.kernels.persistent
from quire.kernels.nvrtc import compiled
from quire.kernels.persistent.launch import DecodeStep, Mailbox, compile_ahead, source
from quire.kernels.persistent.schedule import DecoderSizes, Schedule, WeightFormat, takes

HERE = Path(__file__).parent
FOLDER = Path(quire.kernels.persistent.__file__).parent
NORMED = DecoderSizes(128, 4, 2, 64, 192, 2, 256, 1e-6, 0.125, qk_norm=True)
BIASED = DecoderSizes(
    112, 7, 1, 64, 176, 2, 256, 1e-6, 0.125, qkv_bias=True
)  # 7 query heads per KV head; odd widths
FP8_ROWS = DecoderSizes(128, 4, 2, 64, 176, 2, 256, 1e-6, 0.125, qkv_bias=True, weights="fp8")
FP8_BLOCKS = DecoderSizes(512, 8, 2, 64, 1536, 2, 256, 1e-6, 0.125, qk_norm=True, weights="fp8-block")
INT4 = DecoderSizes(512, 8, 2, 64, 768, 2, 256, 1e-6, 0.125, qkv_bias=True, weights="int4")
TOLERANCE = 1.5e-2  # of relative errors; bf16 has 2^-9 for each rounding
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class HostStep:
    """The kernel of a schedule, compiled for this CPU."""

    def __init__(self, schedule: Schedule, folder: Path, change: tuple[str, str] = ("", "")) -> None:
        text = source({"device.h": (HERE / "persistent_host.h").read_text()})
        assert change[0] in text
        path = folder / "step.cpp"
        path.write_text(text.replace(*change, 1) + (HERE / "persistent_main.h").read_text())
        defines = [f"-D{name}={value}" for name, value in schedule.defines().items()]
        library = folder / "step.so"
        subprocess.run(
            ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", *defines, str(path), "-o", str(library)],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._mail = torch.zeros(schedule.mail_words, dtype=torch.int64)
        self.counters = torch.zeros(2, dtype=torch.int32)

    def __call__(self, *arguments: torch.Tensor | int, seed: int = 0) -> int:
        values = [*arguments[:10], self._mail, self.counters, *arguments[10:]]
        return self._library.run_step(
            *(ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in values),
            ctypes.c_uint64(seed),
        )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a tensor."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


CASES = [
    (NORMED, [37], Schedule(NORMED, 1, BLOCK, 5, warps=1, most_slots=5)),
    (BIASED, [37, 3], Schedule(BIASED, 2, BLOCK, 5, warps=1, most_slots=5)),
    (BIASED, [37], Schedule(BIASED, 1, BLOCK, 7, warps=1, most_slots=5)),
    (NORMED, [37, 3, 0, 1, 16, 15, 100, 33], Schedule(NORMED, 8, BLOCK, 6, warps=2, most_slots=4)),
    (FP8_ROWS, [37], Schedule(FP8_ROWS, 1, BLOCK, 5, warps=1, most_slots=5)),
    (FP8_ROWS, [37, 3, 0, 1], Schedule(FP8_ROWS, 4, BLOCK, 5, warps=1, most_slots=5)),
    (FP8_BLOCKS, [37, 16], Schedule(FP8_BLOCKS, 2, BLOCK, 6, warps=2, most_slots=5)),
    (INT4, [37], Schedule(INT4, 1, BLOCK, 6, warps=1, most_slots=5)),
    (INT4, [37, 16], Schedule(INT4, 2, BLOCK, 6, warps=2, most_slots=5)),
    (INT4, [37, 3, 0, 1], Schedule(INT4, 4, BLOCK, 6, warps=1, most_slots=5)),
]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "sizes, lengths, schedule",
    CASES,
    ids=[
        "one row",
        "bias",
        "parts of inputs",
        "eight rows",
        "fp8",
        "fp8, four rows",
        "fp8 in blocks",
        "int4",
        "int4, two rows",
        "int4, four rows",
    ],
)
def test_a_step_on_fibers_computes_what_pytorch_does(
    sizes: DecoderSizes, lengths: list[int], schedule: Schedule, tmp_path: Path
) -> None:
    decoder = RandomDecoder(sizes, slots=8, context=128, device=torch.device("cpu"))
    step = HostStep(schedule, tmp_path)
    for number in range(2):  # the second step finds the mail of the first
        inputs = decoder.inputs(lengths)
        expected_hidden, expected_logits, expected_entries = decoder.run(inputs)
        hidden, logits = decoder.results(len(lengths))
        assert step(*decoder.arguments(inputs, hidden, logits), seed=number) == 0
        assert error(hidden, expected_hidden) < TOLERANCE and error(logits, expected_logits) < TOLERANCE
        assert error(decoder.new_entries(inputs), expected_entries) < TOLERANCE
        assert step.counters.tolist() == [number + 1, 0]


@NEEDS_COMPILER
def test_the_order_of_threads_changes_nothing(tmp_path: Path) -> None:
    sizes, lengths, schedule = CASES[0]
    decoder = RandomDecoder(sizes, slots=8, context=128, device=torch.device("cpu"))
    step, inputs, found = HostStep(schedule, tmp_path), decoder.inputs(lengths), []
    for seed in range(2):
        hidden, logits = decoder.results(1)
        step(*decoder.arguments(inputs, hidden, logits), seed=seed)
        found.append(logits)
    assert torch.equal(*found)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "change",
    [
        ("while (!barrier_passed(&block.full[self.place.slot], self.place.parity)) {}", ";"),
        (
            "for (bool complete = false; !complete; spin.wait(place)) {",
            "for (bool complete = false; !complete; complete = true) {",
        ),
    ],
    ids=["weights", "mail"],
)
def test_a_kernel_that_does_not_wait_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    sizes, lengths, schedule = CASES[0]
    decoder = RandomDecoder(sizes, slots=8, context=128, device=torch.device("cpu"))
    step, errors = HostStep(schedule, tmp_path, change), []
    for seed in range(2):
        inputs = decoder.inputs(lengths)
        expected, _, _ = decoder.run(inputs)
        hidden, logits = decoder.results(1)
        step(*decoder.arguments(inputs, hidden, logits), seed=seed)
        errors.append(error(hidden, expected))
    assert not max(errors) < TOLERANCE


def spoil_rows(
    decoder: RandomDecoder, rows: int, run: Callable[..., object]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the hidden states and logits of a step, and of the same step with embeddings of rows 0 and 1 not finite."""
    inputs = decoder.inputs([20 + 3 * i for i in range(rows)])
    inputs.ids[0], inputs.ids[1] = 7, 8
    for spoilt in (False, True):
        if spoilt:
            decoder.embedding[7, ::3], decoder.embedding[8, 1] = torch.inf, torch.nan
        hidden, logits = decoder.results(rows)
        run(*decoder.arguments(inputs, hidden, logits))
        yield hidden, logits


def check_others(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for clean, beside in zip(*found, strict=True):
        assert clean.isfinite().all() and torch.equal(clean[2:], beside[2:])
        assert not beside[0].isfinite().all() and not beside[1].isfinite().all()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "sizes, rows",
    [(BIASED, 4), (FP8_ROWS, 4), (FP8_ROWS, 8), (INT4, 4)],
    ids=["bf16", "fp8", "fp8, eight", "int4"],
)
def test_rows_that_are_not_finite_change_no_other(sizes: DecoderSizes, rows: int, tmp_path: Path) -> None:
    decoder = RandomDecoder(sizes, slots=8, context=128, device=torch.device("cpu"))
    step = HostStep(Schedule(sizes, rows, BLOCK, 5, warps=1, most_slots=5), tmp_path)
    check_others(list(spoil_rows(decoder, rows, step)))


def test_blocks_share_all_tiles_of_a_layer() -> None:
    sizes = DecoderSizes(1024, 16, 8, 128, 3072, 28, 151936, 1e-6, 128**-0.5, qk_norm=True)
    schedule = Schedule(sizes, 1, BLOCK, 132)
    stages = {stage.name: stage for stage in schedule.stages()}
    assert {name: stage.tasks for name, stage in stages.items()} == {
        "qkv": 512, "attention": 128, "out": 128, "gate_up": 768, "down": 128, "head": 18992,
    }  # fmt: skip
    assert sum(stage.weight_bytes for stage in stages.values()) == 2 * (15_728_640 + 151936 * 1024)
    assert schedule.shared_bytes <= 232_448


def test_sizes_that_the_kernel_does_not_take_are_named() -> None:
    assert takes(NORMED) == ""
    assert "hidden 100" in takes(DecoderSizes(100, 4, 2, 64, 192, 2, 256, 1e-6, 0.125))
    assert "hidden 136" in takes(DecoderSizes(136, 4, 2, 64, 192, 2, 256, 1e-6, 0.125, weights="fp8"))
    assert "intermediate 640" in takes(
        DecoderSizes(512, 8, 2, 64, 640, 2, 256, 1e-6, 0.125, weights="fp8-block")
    )
    assert "96 dimensions" in takes(DecoderSizes(128, 4, 2, 96, 192, 2, 256, 1e-6, 0.125))


def test_a_compiled_kernel_is_read_from_the_cache(tmp_path: Path) -> None:
    try:
        first = compiled('extern "C" __global__ void nothing() {}', ("--gpu-architecture=sm_90",), tmp_path)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(first + b"cached")
    assert compiled(
        'extern "C" __global__ void nothing() {}', ("--gpu-architecture=sm_90",), tmp_path
    ).endswith(b"cached")


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8-block", "int4"])
@pytest.mark.parametrize(
    "lengths", [[640], [0], [700, 33], [64, 1, 130, 17], [640, 1000, 2, 300, 15, 16, 17, 900]]
)
def test_a_step_on_a_gpu_computes_what_pytorch_does(lengths: list[int], weights: WeightFormat) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    sizes = DecoderSizes(1024, 16, 8, 128, 3072, 3, 151936, 1e-6, 128**-0.5, qk_norm=True, weights=weights)
    decoder = RandomDecoder(sizes, slots=8, context=1024, device=device)
    schedule = Schedule(
        sizes, len(lengths), BLOCK, torch.cuda.get_device_properties(device).multi_processor_count
    )
    step = DecodeStep(schedule, compile_ahead(schedule), Mailbox([schedule], device), device)
    for _ in range(3):
        inputs = decoder.inputs(lengths)
        expected_hidden, expected_logits, expected_entries = decoder.run(inputs)
        hidden, logits = decoder.results(len(lengths))
        step(*decoder.arguments(inputs, hidden, logits))
        assert error(hidden, expected_hidden) < TOLERANCE and error(logits, expected_logits) < TOLERANCE
        assert error(decoder.new_entries(inputs), expected_entries) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8-block", "int4"])
def test_rows_that_are_not_finite_change_no_other_on_a_gpu(weights: WeightFormat) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    sizes = DecoderSizes(1024, 16, 8, 128, 3072, 3, 151936, 1e-6, 128**-0.5, qk_norm=True, weights=weights)
    decoder = RandomDecoder(sizes, slots=8, context=1024, device=device)
    schedule = Schedule(sizes, 4, BLOCK, torch.cuda.get_device_properties(device).multi_processor_count)
    step = DecodeStep(schedule, compile_ahead(schedule), Mailbox([schedule], device), device)
    check_others(list(spoil_rows(decoder, 4, step)))
