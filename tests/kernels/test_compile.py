"""Kernels compile for all supported GPUs and fit in their shared memory; none of these GPUs is needed.

Without a GPU the other tests run in Triton's interpreter, which accepts more than the compiler. These tests take a
sample; the command compile_all.py covers all models and variants.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the compiler in Triton's package",
)
ATTENTION = "_short_kernel,_shared_kernel,_long_kernel"


def compile_all(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("compile_all.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    return subprocess.run(
        [sys.executable, str(script), "--sample", *options],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "dtype", "kernels", "targets"),
    [
        ("Gemma 3 1B", "half", f"{ATTENTION},_skinny", "75,80,86,100,120"),  # 89 has the code of 86
        ("Gemma 3 1B", "float32", ATTENTION, "75,86"),
        ("Qwen3 30B-A3B", "half", "_grouped,_whole", "75,86"),
        ("gpt-oss 20B", "half", "_few_packed,_many_packed", "80,86,90"),
        ("Qwen3-Next 80B-A3B", "half", "_router_few,_one_gate_up,_one_down,_delta_step", "80,90"),
        (
            "DeepSeek V3",
            "half",
            "_latent_kernel,_norm_rotate_latent,_chosen_kernel,_choose_kernel,_score_kernel",
            "90",
        ),
        ("DeepSeek V2 Lite", "half", "_latent_kernel,_by_head", "86"),
        ("gpt-oss 20B", "half", f"{ATTENTION},_merge_kernel", "90"),
        ("GLM-4 9B", "half", "_norm_rotate", "90"),
        ("Phi-4 mini", "half", "_norm_rotate", "75,90"),
    ],
)
def test_kernels_fit_in_shared_memory(
    model: str, dtype: str, kernels: str, targets: str, tmp_path: Path
) -> None:
    options = ("--models", model, "--dtypes", dtype, "--kernels", kernels, "--targets", targets)
    done = compile_all(tmp_path, *options)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_kernel_of_expanded_latents_assembles(tmp_path: Path) -> None:
    options = (
        "--models",
        "DeepSeek V2 Lite",
        "--dtypes",
        "half",
        "--targets",
        "90",
        "--parts",
        "expanded_latents",
    )
    done = compile_all(tmp_path, *options, "--binary")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "_expanded_kernel" in done.stdout


# Kernels whose tiles Triton has divided over warps such that they exchange numbers in each turn of a loop. It depends on
# Triton's version, so these tests also run with that of a machine with a GPU.
DIVIDED = [
    ("_route", "Qwen3-Next 80B-A3B", "REDUX:0"),  # a row of logits belongs to one warp
    ("_router_few", "Qwen3-Next 80B-A3B", "REDUX:0"),
    ("_nibble_gemv", "Llama 3.1 8B", "SHFL:8"),  # a row of a weight is divided over all warps
]


def check_loops(kernel: str, model: str, rule: str, folder: Path) -> None:
    where = ("--models", model, "--dtypes", "half", "--targets", "90", "--kernels", kernel)
    done = compile_all(folder, *where, "--loops", rule)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kernel in done.stdout


@pytest.mark.parametrize(("kernel", "model", "rule"), DIVIDED)
def test_warps_do_not_exchange_numbers_in_loops(kernel: str, model: str, rule: str, tmp_path: Path) -> None:
    check_loops(kernel, model, rule, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "model", "rule"), DIVIDED)
def test_warps_do_not_exchange_numbers_in_loops_with_this_triton(
    kernel: str, model: str, rule: str, tmp_path: Path
) -> None:
    check_loops(kernel, model, rule, tmp_path)


# What slowed a kernel down, with an older Triton more than with a newer one, so these tests run with both, too.
CHECKED = [
    # Scales and blocks of keys are not loaded once for each column of scores: 19 to 124 copies of 4 bytes.
    ("_short_kernel,_long_kernel,_shared_kernel", "coded_attention", ("--most", "LDGSTS.E:7")),
    ("_relate", "states", ("--forbid", "LDL,STL")),  # no registers in memory
]


def check_instructions(kernels: str, part: str, rule: tuple[str, ...], folder: Path) -> None:
    where = ("--models", "Qwen3-Next 80B-A3B", "--dtypes", "half", "--targets", "90", "--kernels", kernels)
    done = compile_all(folder, *where, "--parts", part, *rule)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(kernel in done.stdout for kernel in kernels.split(","))


@pytest.mark.parametrize(("kernels", "part", "rule"), CHECKED)
def test_kernels_have_no_slow_instructions(
    kernels: str, part: str, rule: tuple[str, ...], tmp_path: Path
) -> None:
    check_instructions(kernels, part, rule, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernels", "part", "rule"), CHECKED)
def test_kernels_have_no_slow_instructions_with_this_triton(
    kernels: str, part: str, rule: tuple[str, ...], tmp_path: Path
) -> None:
    check_instructions(kernels, part, rule, tmp_path)


# Conversions that few units of a GPU run, and loads of single bytes from shared memory. Attention over FP8 keys and values
# was slower than over bf16 ones while its inner loop had some for every number.
SLOW = "F2F.BF16,F2F.F16,LDS.U8,LDS.S8"


@pytest.mark.parametrize(("target", "options"), [("75", ()), ("90", ("--forbid", SLOW))])
def test_kernels_of_codes_in_the_cache_compile(target: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Their launches come after those that a sample takes, so they are compiled on their own."""
    where = ("--models", "Qwen3 0.6B", "--dtypes", "half", "--targets", target, "--parts", "coded_attention")
    done = compile_all(tmp_path, *where, *options)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("target", ["75", "90"])
def test_kernels_assemble(target: str, tmp_path: Path) -> None:
    """For the oldest GPU, and for the one that kernels are tuned on."""
    options = ("--models", "Qwen3 0.6B", "--dtypes", "half", "--targets", target, "--binary")
    done = compile_all(tmp_path, *options)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_kernel_that_takes_too_much_is_told(tmp_path: Path) -> None:
    """With the tiles of Hopper, Gemma 3 does not fit on an RTX 4090."""
    options = ("--models", "Gemma 3 1B", "--dtypes", "half", "--targets", "89", "--tiles-of", "90")
    done = compile_all(tmp_path, *options, "--kernels", "_long_kernel")
    assert done.returncode == 1
    assert "Gemma 3 1B: _long_kernel takes 147712 of 101376 bytes" in done.stderr
