"""`quire serve --ray` on a cluster: placement, answers, a node that dies, and no process left."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from serving import Server, serving

DEMO = [
    "demo",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "16777216",
    "--max-model-len",
    "256",
    "--cpu-threads",
    "1",
]
BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def processes(cluster: Any) -> dict[int, int]:
    """Return the processes of engines and ranks on the nodes of the cluster: the process id of the node by their own."""
    found = {}
    for node in cluster.list_all_nodes():
        for process in psutil.Process(raylet_of(node)).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "quire.engine_process" in words or "quire.rank_process" in words:
                found[process.pid] = raylet_of(node)
    return found


def answer(server: Server) -> str:
    found = server.post("/v1/completions", BODY)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["text"]
    return text


def test_replicas_of_several_ranks_over_nodes_survive_the_death_of_one(cluster: Any) -> None:
    """Two replicas of two ranks each on three nodes with two cores: a replica per node, and room for another one."""
    with serving(*DEMO) as alone:
        expected = answer(alone)
    flags = [*DEMO, "--ray", "-dp", "2", "--tensor-parallel-size", "2"]
    with serving(*flags, env={"RAY_ADDRESS": cluster.address}) as server:
        nodes = processes(cluster)
        assert len(nodes) == 4 and len(set(nodes.values())) == 2, "a node has room for one replica"
        assert [answer(server) for _ in range(4)] == [expected] * 4
        busy = [node for node in cluster.list_all_nodes() if raylet_of(node) in nodes.values()]
        victim = next(node for node in busy if node is not cluster.head_node)
        cluster.remove_node(victim, allow_graceful=False)
        server.wait_for(lambda: failed(server))
        assert [answer(server) for _ in range(2)] == [expected] * 2, "the other replica serves"
        server.wait_for(lambda: up(server) == 2, 90)
        assert sum(one["restarts"] for one in server.stats()["replicas"]) >= 1
        assert [answer(server) for _ in range(4)] == [expected] * 4
        everyone = [psutil.Process(pid) for pid in {**nodes, **processes(cluster)} if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(everyone, timeout=15)[1], "a process was left"
    cluster.add_node(num_cpus=2)


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def failed(server: Server) -> list[Any]:
    return [one for one in server.stats()["replicas"] if one["status"] != "serving" or one["restarts"]]


def up(server: Server) -> int:
    return sum(one["status"] == "serving" for one in server.stats()["replicas"])


def test_a_cluster_without_room_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.config import EngineConfig
    from quire.ray import cluster as placing
    from quire.types import ConfigError

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr(placing, "_PLACE_S", 1.0)
    with pytest.raises(ConfigError, match="has no room for 64 ranks"):
        placing.PlacedRanks(EngineConfig(device="cpu", tensor_parallel_size=64))
