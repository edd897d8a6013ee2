"""A server in a separate process, for tests: started with flags, found by the port it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

Check = Callable[[Any, str], None]  # raises unless a body matches a named schema of OpenAI's API description
JSON = {"content-type": "application/json"}
_START_S = 120  # a loaded machine imports torch slowly


class Server:
    """A process of `quire serve` with `flags`. `lines` is its output so far."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(_START_S)
        found = re.search(r"serving on (https?)://[^ ]*?:(\d+) ", self.output)
        if not found:
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{self.output}")
        self.url = f"{found[1]}://127.0.0.1:{found[2]}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "serving on" in line:
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def post_bytes(self, path: str, body: bytes | Iterable[bytes], **options: Any) -> httpx.Response:
        """Post bytes with the content type of JSON, which they need not be."""
        return self.http.post(path, content=body, headers=JSON, **options)

    def stats(self) -> dict[str, Any]:
        return self.http.get("/stats").json()

    def engine_pid(self) -> int:
        return engine_of(self.process.pid).pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Wait for the end of the process and return its exit code."""
        return self.process.wait(seconds)

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        """Wait until `condition` returns a true value, and return it. A busy machine may take long."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds} s; the server printed:\n{self.output}"
            time.sleep(0.02)
        return found

    def wait_until_idle(self, seconds: float = 10) -> dict[str, Any]:
        """Wait until no request is open and return /stats."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if not (stats["requests"]["active"] or stats["requests"]["waiting"] or stats["requests"]["open"]):
                return stats
            assert time.monotonic() < deadline, f"not idle after {seconds} s: {stats}"
            time.sleep(0.02)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def listens_at(pid: int) -> int | None:
    """Return the port of a server whose output is not read, or None before it listens."""
    ports = [c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    return ports[0] if ports else None


def engine_of(pid: int) -> psutil.Process:
    """Return the engine process of a server, which also has helper processes."""
    (found,) = (p for p in psutil.Process(pid).children() if "quire.engine_process" in p.cmdline())
    return found


@contextmanager
def serving(*flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(*flags, env=env)
    try:
        yield server
    finally:
        server.close()


def events(response: httpx.Response) -> list[Any]:
    """Return the bodies of a stream's events; the last one is the string [DONE]."""
    found = []
    for line in response.text.split("\n\n"):
        if line:
            assert line.startswith("data: "), line
            body = line.removeprefix("data: ")
            found.append(body if body == "[DONE]" else json.loads(body))
    return found


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}
