"""Kernels of steps of all sizes are compiled at a start that finds none on disk, so that no request waits for them."""

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
@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen3-moe", "qwen3-next"])
def test_a_start_compiles_the_kernels_of_all_steps(model: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("step_kernels.py"))
    done = subprocess.run(
        [sys.executable, script, model], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *missing, kernels = done.stdout.splitlines()
    assert not missing
    name, _, count = kernels.partition(" kernels: ")
    assert name == model and int(count) > 40
