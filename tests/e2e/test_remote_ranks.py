"""Ranks that connect over TCP, as from other hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.cli.main import main
from quire.frontend.client.remote import Hello, accept, connect, listen, split_address
from quire.ranks.remote import await_ranks
from quire.types import ConfigError, EngineDead

BASE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_model_len": 128, "kv_cache_memory": 1 << 23,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_remote_ranks_answer_as_one_and_end_with_the_engine() -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM("demo", **BASE) as llm:
        expected = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "quire", "rank", address, "--device", "cpu", "--count", "1"]
    ranks = subprocess.Popen([*command, "--rank-token", "secret"], stderr=subprocess.PIPE, text=True)
    llm = LLM("demo", **BASE, tensor_parallel_size=2, rank_address=address, rank_token="secret")
    try:
        assert llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids == expected
        (rank,) = psutil.Process(ranks.pid).children()
        assert not [
            p for p in psutil.Process().children(recursive=True) if "rank_process" in p.cmdline()[2:3]
        ]
        rank.kill()
        with pytest.raises(
            EngineDead, match=rf"rank 1 \(process {rank.pid} on 127.0.0.1\) ended with a closed connection"
        ):
            llm.generate("Once", params, use_tqdm=False)
        assert ranks.wait(20) != 0
    finally:
        llm.close()
        ranks.kill()
        ranks.communicate()


def test_ranks_are_numbered_host_by_host_and_strangers_are_refused() -> None:
    address = f"127.0.0.1:{free_port()}"
    host, port = split_address(address)
    pool = []

    def join(token: str, name: str, device: str) -> None:
        pool.append(connect(host, port, Hello(token, name, 1, device), 5))

    import threading

    joins = [
        ("wrong", "a", "x"),
        ("right", "b", "cuda:1"),
        ("right", "b", "cuda:0"),
        ("right", "a", "cuda:3"),
    ]
    threads = [threading.Thread(target=join, args=one) for one in joins]
    for thread in threads:
        thread.start()
    found = await_ranks(address, "right", 3, 10)
    assert [(rank.host, rank.device) for rank in found] == [("a", "cuda:3"), ("b", "cuda:0"), ("b", "cuda:1")]
    assert [rank.process.poll() for rank in found] == [None] * 3
    for thread in threads:
        thread.join()
    for end in pool:
        end.close()
    assert all(rank.process.poll() == 1 for rank in found)
    with pytest.raises(
        ConfigError, match=r"0 of 1 other ranks have connected to .* within 0.1 s; start the rest"
    ):
        await_ranks(address, "right", 1, 0.1)


def test_garbage_is_no_introduction() -> None:
    with listen("127.0.0.1") as server, socket.create_connection(server.getsockname()) as end:
        end.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert accept(server, "right", 0.2) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rank_address": "nowhere", "tensor_parallel_size": 2},
            "rank_address must be HOST:PORT, got nowhere",
        ),
        ({"rank_address": "a:1"}, "rank_address needs tensor_parallel_size above 1"),
        ({"rank_address": "a:1", "tensor_parallel_size": 2}, "rank_address needs a rank_token"),
    ],
)
def test_settings_that_cannot_work(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_RANK_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


def test_the_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_RANK_TOKEN", raising=False)
    assert main(["rank", "127.0.0.1:1"]) == 2
    assert "needs the rank_token" in capsys.readouterr().err
    assert main(["rank", "127.0.0.1", "--rank-token", "x"]) == 2
    assert "must be HOST:PORT" in capsys.readouterr().err
