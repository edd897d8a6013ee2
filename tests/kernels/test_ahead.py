"""Compiling side by side: kernels are compiled once, and not run; nothing is left behind."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from quire.kernels import norm
from quire.kernels.ahead import side_by_side

CPU = torch.device("cpu")


def test_fresh_memory_is_zeroed_within_and_only_there() -> None:
    with side_by_side(CPU):
        x = torch.empty(1000, dtype=torch.int64)
        assert not any(y.any() for y in (x, torch.empty_like(x), x.new_empty(1000)))
        assert knobs.runtime.jit_cache_hook is not None
    assert knobs.runtime.jit_cache_hook is None


def test_an_error_within_ends_it() -> None:
    with pytest.raises(KeyError), side_by_side(CPU):
        raise KeyError("within")
    assert knobs.runtime.jit_cache_hook is None


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the compiler in Triton's package",
)
def test_kernels_are_compiled_in_threads_and_not_run(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "4 2 0 0"), done.stderr[-2000:]


@pytest.mark.gpu
def test_kernels_are_compiled_once_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compiled: list[str] = []

    def note(**launch: Any) -> None:
        compiled.append(launch["fn"].name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    x, weight = torch.randn(3, 1234, device=device), torch.randn(1234, device=device)  # a width of no model
    with side_by_side(device):
        for _ in range(3):
            assert not norm.rms_norm(x, weight, 1e-6).any()
            assert not norm.add_rms_norm(x, x, weight, 1e-6)[1].any()
    assert len(compiled) == 2
    with side_by_side(device):  # nor are those that are compiled
        assert not norm.rms_norm(x, weight, 1e-6).any()
    expected = torch.nn.functional.rms_norm(x, (1234,), weight, 1e-6)
    assert torch.allclose(norm.rms_norm(x, weight, 1e-6), expected, atol=1e-4)
    assert torch.equal(norm.add_rms_norm(x, x, weight, 1e-6)[1], x + x)
    assert len(compiled) == 2
