"""POST /api/pull, from a local server that speaks the Hugging Face hub's protocol."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving import Server, serving

PULL = "/api/pull"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000, "pytorch_model.bin": b"no"}


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, tiny/model, that sends its weights only while `gate` is set."""

    gate = threading.Event()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api/models/tiny/model", "/api/models/tiny/model/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            self._send({"id": "tiny/model", "sha": COMMIT, "siblings": siblings}, with_body)
        elif path.startswith("/api/models/tiny/model/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()
            ]
            self._send(files, with_body)
        elif path.startswith(f"/tiny/model/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if with_body and name == "model.safetensors":
                assert self.gate.wait(30)
            self._send_bytes(FILES[name], with_body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: object, with_body: bool) -> None:
        self._send_bytes(json.dumps(body).encode(), with_body, {"Content-Type": "application/json"})

    def _send_bytes(self, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def puller(cache: Path) -> Iterator[Server]:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    with serving("demo", "--dry-run", "--allow-pull", env=env) as server:
        yield server
    hub.shutdown()
    hub.server_close()


def test_progress_is_streamed(puller: Server, cache: Path) -> None:
    Hub.gate.clear()
    with puller.http.stream("POST", PULL, json={"model": "hf.co/tiny/model:latest"}) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        found = response.iter_lines()
        assert json.loads(next(found)) == {"status": "pulling manifest"}
        second = puller.post(PULL, {"model": "tiny/model"})
        assert second.status_code == 503 and "one pull runs at a time" in second.json()["error"]
        assert puller.http.get("/health").status_code == 200
        Hub.gate.set()
        *progress, last = [json.loads(line) for line in found]
    assert last == {"status": "success"}
    assert all(line["status"] == "downloading" and line["completed"] <= line["total"] for line in progress)
    assert progress[-1]["completed"] == progress[-1]["total"] >= len(FILES["model.safetensors"])
    (snapshot,) = cache.glob("hub/models--tiny--model/snapshots/*")
    assert {path.name for path in snapshot.iterdir()} == {"config.json", "model.safetensors"}
    assert (snapshot / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    whole = puller.post(PULL, {"name": "tiny/model", "stream": False})
    assert whole.json() == {"status": "success"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("tiny/missing", "tiny/missing is neither a local path nor a repository that you can see"),
        ("../etc", "'../etc' is not a Hugging Face id"),
        ("demo/", "'demo/' is not a Hugging Face id"),
    ],
)
def test_models_that_cannot_be_pulled(puller: Server, model: str, says: str) -> None:
    error = puller.post(PULL, {"model": model, "stream": False}).json()
    assert says in error["error"] and error["param"] == "model"
    first, last = [json.loads(line) for line in puller.post(PULL, {"model": model}).text.splitlines()]
    assert first == {"status": "pulling manifest"} and says in last["error"]


def test_a_name_is_needed(puller: Server) -> None:
    error = puller.post(PULL, {})
    assert error.status_code == 400 and error.json()["param"] == "model"


def test_a_client_that_leaves_ends_its_pull(puller: Server, cache: Path) -> None:
    """The thread ends at the next byte, so that another pull can start."""
    shutil.rmtree(cache / "hub" / "models--tiny--model")
    Hub.gate.clear()
    with puller.http.stream("POST", PULL, json={"model": "tiny/model"}) as response:
        next(response.iter_lines())
    assert puller.post(PULL, {"model": "tiny/model", "stream": False}).status_code == 503
    Hub.gate.set()
    again = puller.wait_for(
        lambda: (
            (answer := puller.post(PULL, {"model": "tiny/model", "stream": False})).status_code == 200
            and answer
        )
    )
    assert again.json() == {"status": "success"}
