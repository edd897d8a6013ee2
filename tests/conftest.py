"""Shared by all tests: one thread per process (tests run side by side), and where the test data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as quire/config.py, which some tests import after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def rotate_gpus() -> None:
    """On a machine with several GPUs, give each process of pytest-xdist another one as its first."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw") or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        first = int(worker.removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + i) % count) for i in range(count))


rotate_gpus()

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of real checkpoints, tokenizers and configs that the project does not ship."""
    if not DATA.is_dir():
        pytest.skip(f"the test data folder {DATA.name} is not beside the checkout")
    return DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
