"""The library of C kernels: its structures match ops.py, and it is correct on other processors and compilers."""

from __future__ import annotations

import ctypes
import logging
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from quire.kernels.cpu import build, compiled_kernels, ops

CHECK = Path(__file__).with_name("step_check.c")
# The compiler, its flags for a program, and the command that runs the program here.
ARM = ("aarch64-linux-gnu-gcc", ["-static"], ["qemu-aarch64"])
CLANG = ("clang", [], [])
AVX2 = ("gcc", ["-mavx2", "-mfma", "-mf16c"], [])
NATIVE = ("gcc", ["-march=native"], [])


def library() -> ctypes.CDLL:
    if compiled_kernels() is None:
        pytest.skip("no C compiler")
    return compiled_kernels().library  # type: ignore[union-attr]


def test_the_structures_match() -> None:
    ops.check_layout(library())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"surplus": ctypes.c_int64}, r"Product 64 here, 56 there|Product 72 here, 64 there"),
        ({"other": ctypes.c_int32}, r"Product.other \d+ here, missing there"),
    ],
)
def test_a_structure_that_does_not_match_is_refused(
    fields: dict[str, type], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CProduct(ctypes.Structure):
        _fields_ = [*ops.CProduct._fields_[:-1], *fields.items(), ops.CProduct._fields_[-1]]

    found = library()
    monkeypatch.setattr(ops, "CProduct", CProduct)
    with pytest.raises(RuntimeError, match=told):
        ops.CpuKernels(found)


def results(folder: Path, compiler: str, flags: list[str], run: list[str]) -> dict[str, np.ndarray]:
    """Compile and run step_check.c, and return the numbers that it prints by name."""
    program = folder / f"check-{compiler}"
    sources = [f'-D{path.stem.upper()}="{path}"' for path in build.SOURCES]
    flags = [*flags, *(flag for flag in build.FLAGS if flag not in ("-O2", "-shared", "-fPIC"))]
    flags += ["-O1", "-Wno-psabi"]  # half the time
    subprocess.run([compiler, *flags, *sources, str(CHECK), "-o", str(program), "-lm"], check=True)
    printed = subprocess.run([*run, str(program)], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    assert len(lines) == 112
    return {f"{i} {name}": np.array(values, float) for i, (name, *values) in enumerate(lines)}


@cache
def results_here() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        return results(Path(folder), "gcc", [], [])


@pytest.mark.parametrize("target", [ARM, CLANG, AVX2, NATIVE], ids=["arm", "clang", "avx2", "native"])
def test_the_kernels_on_another_processor_or_compiler(
    target: tuple[str, list[str], list[str]], tmp_path: Path
) -> None:
    compiler, flags, run = target
    for program in ("gcc", compiler, *run):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt-get install gcc-aarch64-linux-gnu qemu-user clang)")
    if target is AVX2 and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no AVX2")
    wanted = results_here()
    for name, values in results(tmp_path, compiler, flags, run).items():
        coarse = "bf16" in name or "coded" in name  # a number may be rounded to the next code
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if coarse else {"rtol": 2e-5, "atol": 2e-6}
        if "codes/fp32" in name:  # AVX-512 rounds weights of values to 16 bits
            tolerance = {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(values, wanted[name], err_msg=name, **tolerance)


def fake_compiler(folder: Path, refused: str) -> str:
    """Make a compiler that refuses flags with this prefix and otherwise runs cc."""
    path = folder / "fake-cc"
    path.write_text(
        f'#!/bin/sh\nfor a; do case "$a" in {refused}*) echo "no $a" >&2; exit 1;; esac; done\nexec cc "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("refused", ["-march=", "-m"])
def test_a_compiler_that_does_not_know_the_processor(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    monkeypatch.setattr(build, "_COMPILERS", (fake_compiler(tmp_path, refused),))
    monkeypatch.setattr(build, "_FOLDERS", (str(tmp_path / "made"),))
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])  # sooner
    made = build.open_library()
    assert made is not None
    ops.CpuKernels(made)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_torch_does_it_all(
    platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.sys, "platform", platform)
    with caplog.at_level(logging.INFO):
        assert build.open_library() is None
    assert [record.message for record in caplog.records] == [
        "no compiled kernels on this CPU: they need Linux, so PyTorch runs every step"
    ]
