"""`quire pull`, `models` and `rm` with a hub of their own, and `quire completion` in a real shell."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tiny import write_tiny

COMMIT = "0123456789" * 4


class Hub(BaseHTTPRequestHandler):
    """The routes of Hugging Face that a download uses, for the one repository in `folder`."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = sorted(self.folder.iterdir())
        if path == "/api/models/me/tiny/revision/main":
            siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
            return self._send(json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"/api/models/me/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                for file in files
            ]
            return self._send(json.dumps(entries).encode())
        for file in files:
            if path == f"/me/tiny/resolve/{COMMIT}/{file.name}":
                data = file.read_bytes()
                tag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(data, tag)
        return self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def _send(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    Hub.folder = write_tiny(tmp_path / "tiny")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    own = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    yield {**os.environ, **own, "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    server.server_close()


def quire(environment: dict[str, str], *args: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "quire", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def names(environment: dict[str, str]) -> dict[str, Any]:
    return {model["name"]: model for model in json.loads(quire(environment, "models", "--json")[1])}


def test_a_model_is_pulled_listed_and_deleted(environment: dict[str, str]) -> None:
    assert set(names(environment)) == {"demo", "demo-draft"}
    code, out, err = quire(environment, "pull", "me/tiny")
    assert code == 0 and out.startswith("me/tiny: ") and "Traceback" not in err, err
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    found = names(offline)["me/tiny"]
    assert found["format"] == "safetensors" and found["size_bytes"] > 10_000
    assert "me/tiny" in quire(offline, "models", "--quiet")[1].splitlines()
    assert "safetensors, built in" in quire(offline, "models")[1]
    code, _, err = quire(offline, "rm", "me/tiny")
    assert code == 2 and "add --yes" in err and "me/tiny" in names(offline)
    code, out, err = quire(offline, "rm", "--yes", "me/tiny")
    assert code == 0 and out.startswith("Deleted me/tiny: "), err
    assert "me/tiny" not in names(offline)


def test_names_that_cannot_be_pulled_or_deleted(environment: dict[str, str]) -> None:
    for args, expected, says in (
        (["pull", "me/none"], 1, "me/none is neither a local path nor a repository"),
        (["pull", "demo"], 2, "demo is on this machine already"),
        (["rm", "demo"], 2, "demo is built in"),
        (["rm", "me/none"], 2, "me/none is not in the local cache"),
    ):
        code, out, err = quire(environment, *args)
        assert (code, out) == (expected, "") and says in err and err.count("\n") == 1, err
    code, _, err = quire({**environment, "HF_HUB_OFFLINE": "1"}, "pull", "me/tiny")
    assert code == 2 and "while HF_HUB_OFFLINE is set" in err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "quire.bash"
    script.write_text(quire({**os.environ}, "completion", "bash")[1])
    ask = f'source {script}; t() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _quire; echo "${{COMPREPLY[@]}}"; }}; '
    for words, expected in (
        ("quire ser", "serve server"),
        ("quire serve --max-num-se", "--max-num-seqs"),
        ("quire chat demo --dtype f", "float32 float16"),
        ("quire bench th", "throughput"),
        ("quire bench latency --batch-s", "--batch-size"),
        ("quire doctor demo-", "demo-draft"),
    ):
        done = subprocess.run(
            ["bash", "-c", ask + f"t {words}"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.stdout.strip() == expected, (words, done.stderr)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(tmp_path: Path, shell: str) -> None:
    code, out, err = quire({**os.environ}, "completion", shell)
    assert code == 0 and "serve" in out and "max-num-seqs" in out, err
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
