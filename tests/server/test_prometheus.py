"""A real Prometheus scrapes a server, and every query of the dashboard finds data."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Server, chat, serving

from dashboard import expressions

_WAIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--dry-run", "--dry-run-step-ms", "2", "--max-num-seqs", "2") as found:
        yield found


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Start a Prometheus that scrapes `server` four times a second, and return a client of its API."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config, log = folder / "prometheus.yml", folder / "log"
    target = server.url.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms}\n"
        f"scrape_configs: [{{job_name: quire, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}", "--web.listen-address=127.0.0.1:0"]
    with log.open("w") as output:
        process = subprocess.Popen([binary, *flags], stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=address_in(log, process), timeout=10) as http:
            yield http
    finally:
        process.kill()
        process.wait()


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address that Prometheus listens on."""
    deadline_s = time.monotonic() + _WAIT_S
    while not (found := re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)
    return f"http://{found[1]}"


def values(prometheus: httpx.Client, query: str) -> list[float]:
    found = prometheus.get("/api/v1/query", params={"query": query})
    if found.status_code == 503:  # it is starting
        return []
    assert found.json()["status"] == "success", (query, found.text)
    return [float(series["value"][1]) for series in found.json()["data"]["result"]]


def test_every_panel_of_the_dashboard_has_data(server: Server, prometheus: httpx.Client) -> None:
    missing = set(expressions())
    assert len(missing) >= 40
    deadline_s = time.monotonic() + _WAIT_S
    while missing:
        body = chat("Hello there", max_tokens=20, ignore_eos=True)
        assert server.post("/v1/chat/completions", body).status_code == 200
        missing = {q for q in missing if not any(map(math.isfinite, values(prometheus, q)))}
        assert time.monotonic() < deadline_s, missing
    (up,) = values(prometheus, "up")
    assert up == 1
