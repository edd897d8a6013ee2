"""Where NVRTC is found, and what happens without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels import nvrtc
from quire.kernels.hopper import rows
from quire.kernels.target import KNOWN_TARGETS, Target, log_choice


@pytest.fixture(autouse=True)
def no_library_is_remembered() -> Iterator[None]:
    nvrtc.load_library.cache_clear()
    yield
    nvrtc.load_library.cache_clear()


def test_it_is_found_in_the_packages_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CUDA build of PyTorch requires them, and they are not on the library path of the system."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    name = nvrtc.library_names()[0]
    for file in (name, "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert folder / name in list(nvrtc.package_libraries())


def test_without_it_other_products_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvrtc, "library_names", lambda: ("libnone.so",))
    monkeypatch.setattr(nvrtc, "package_libraries", lambda: iter(()))
    log_choice.cache_clear()
    assert not nvrtc.available()
    with pytest.raises(
        RuntimeError, match=r"NVRTC is missing: .*libnone\.so.* reinstall the CUDA build of torch"
    ):
        nvrtc.compiled("", ())
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(KNOWN_TARGETS, gpu, Target("H100", 90, 232_448, 132))
    weight = torch.empty(256, 128, dtype=torch.bfloat16, device="meta")

    class OnGpu:
        """A weight that says it is on a GPU, where this machine may have none."""

        device, dtype, shape = gpu, weight.dtype, weight.shape
        is_contiguous, element_size = weight.is_contiguous, weight.element_size

    assert not rows.takes(OnGpu())  # type: ignore[arg-type]
    assert "NVRTC is missing" in caplog.text
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    assert rows.takes(OnGpu())  # type: ignore[arg-type]
