"""Kernels compile for the GPU that they were made for. The interpreter, in which the other tests run without a
GPU, accepts more than the compiler does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the compiler in Triton's package",
)
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_all.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(done.stdout.split())
    assert {
        "_short_kernel",
        "_shared_kernel",
        "_long_kernel",
        "_prepare_kernel",
        "_norm_rotate",
        "_scan",
        "_gemv",
        "_whole",
        "_skinny",
    } <= names
