"""A Ray cluster of several nodes on this machine. `make test-ray` runs these tests; they are skipped without Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

NODES = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless QUIRE_TEST_RAY is 1: a cluster takes a minute of two cores."""
    if os.environ.get("QUIRE_TEST_RAY") == "1":
        return
    skip = pytest.mark.skip(reason="needs Ray and a minute: make test-ray")
    for item in items:
        if "tests/ray_cluster/" in item.path.as_posix():
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Start nodes with two cores each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_DEDUP_LOGS"] = "0"
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # a busy machine starts processes slowly
        os.environ[f"RAY_SERVE_PROXY_{name}_TIMEOUT_S"] = "120"
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"head": 1}})
    found.workers = [found.add_node(num_cpus=2) for _ in range(NODES - 1)]
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()
