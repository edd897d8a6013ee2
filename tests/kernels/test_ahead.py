"""Parallel compilation: kernels are compiled once and not run, and nothing remains changed afterwards."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.overrides import _get_current_function_mode
from triton import knobs

from quire.kernels import jit, norm
from quire.kernels.ahead import background_compilation
from quire.kernels.compile_job import build_launcher

CPU = torch.device("cpu")


def test_fresh_memory_is_zeroed_inside_and_only_in_that_thread() -> None:
    elsewhere: list[bool] = []
    with background_compilation(CPU):
        x = torch.empty(1000, dtype=torch.int64)
        assert not any(y.any() for y in (x, torch.empty_like(x), x.new_empty(1000)))
        thread = threading.Thread(target=lambda: elsewhere.append(_get_current_function_mode() is None))
        thread.start()
        thread.join()
    assert elsewhere == [True] and _get_current_function_mode() is None


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(KeyError), background_compilation(CPU):
        raise KeyError("inside")
    with background_compilation(CPU):  # another can begin
        pass


def test_every_kernel_that_is_launched_is_made_by_our_decorator() -> None:
    """Otherwise a launch of it inside `background_compilation` would run."""
    folder = Path(jit.__file__).parent
    trees = [ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))]
    launched = {
        ast.unparse(node.func.value).split(".")[-1]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    plain, ours = set[str](), set[str]()
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)):
        made_by = {ast.unparse(made).split("(")[0] for made in node.decorator_list}
        if "kernel" in made_by:
            ours.add(node.name)
        elif "triton.jit" in made_by:
            plain.add(node.name)
    assert ours <= launched and len(ours) > 15
    assert not launched & plain


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs the compiler in Triton's package",
)
def test_kernels_are_compiled_in_threads_and_not_run(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "not on disk 2 0 0",
        "launches of other threads 2",
        "launches at once 4",
        "launches behind it 1",
        "compiled in other processes 3 here 0",
        "without them 1 here 1",
    ]


def test_names_on_disk_do_not_depend_on_what_was_compiled_before() -> None:
    """Otherwise another process, or the next start with other settings, would not find a kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("kernel_names.py"))
    printed = []
    for step in ("1", "-1"):
        done = subprocess.run([sys.executable, script, step], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) > 100
    assert printed[0] == printed[1]


@pytest.mark.gpu
def test_kernels_are_compiled_once_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compiled: list[str] = []

    def note(**launch: Any) -> None:
        compiled.append(launch["fn"].name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    x, weight = torch.randn(3, 1234, device=device), torch.randn(1234, device=device)  # a width of no model
    with background_compilation(device):
        for _ in range(3):
            assert not norm.rms_norm(x, weight, 1e-6).any()
            assert not norm.add_rms_norm(x, x, weight, 1e-6)[1].any()
    assert len(compiled) == 2
    with background_compilation(device):  # nor are those that are compiled
        assert not norm.rms_norm(x, weight, 1e-6).any()
    expected = torch.nn.functional.rms_norm(x, (1234,), weight, 1e-6)
    assert torch.allclose(norm.rms_norm(x, weight, 1e-6), expected, atol=1e-4)
    assert torch.equal(norm.add_rms_norm(x, x, weight, 1e-6)[1], x + x)
    assert len(compiled) == 2


def test_processes_build_launchers_that_are_extension_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Triton 3.6 the engine would build them one after the other. Later versions have one for all kernels."""
    from triton.backends.nvidia import driver

    compiled: Any = SimpleNamespace(src="source", metadata="metadata")
    built: list[tuple[str, str]] = []
    monkeypatch.setattr(driver, "CudaLauncher", lambda src, metadata: built.append((src, metadata)))
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    build_launcher(compiled)
    assert not built
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    build_launcher(compiled)
    assert built == [("source", "metadata")]
