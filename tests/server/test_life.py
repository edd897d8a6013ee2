"""The life of a server: flags, keys, TLS, and every way to stop."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Server, chat, events, listens_at, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "a b c d", "max_tokens": 100, "ignore_eos": True}
SLOW = ["demo", "--dry-run", "--dry-run-step-ms", "20"]


def quire(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *args], capture_output=True, text=True, timeout=120)


class Background:
    """A request in a separate thread."""

    def __init__(self, server: Server, body: dict) -> None:
        self._server, self._body = server, body
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.response = httpx.post(self._server.url + TEXT, json=self._body, timeout=60)

    def result(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None
        return self.response


class UnhealthyAnswers:
    """The answers of /health and of a request once the server is unhealthy.

    They are collected in a thread, because the server answers only for a short time after that.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._found: list[httpx.Response] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (health := self._server.http.get("/health")).status_code == 200:
            time.sleep(0.02)
        self._found = [health, self._server.post(TEXT, LONG)]

    def result(self) -> list[httpx.Response]:
        self._thread.join(60)
        return self._found


def wait_until_active(server: Server, count: int) -> None:
    """Wait until `count` requests run and have some tokens."""

    def active() -> bool:
        stats = server.stats()
        return stats["requests"]["active"] >= count and stats["tokens"]["generated"] >= 8

    server.wait_for(active)


# ------------------------------------------------------------------------------------------- start


def test_what_keeps_a_server_from_starting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = quire("serve", "demo", "--dry-run", "--port", port)
    assert found.returncode == 2 and f"127.0.0.1:{port}" in found.stderr and "--port" in found.stderr
    found = quire("serve", "/no/such/model", "--dry-run", "--port", "0")
    assert found.returncode == 1 and "/no/such/model" in found.stderr
    (tmp_path / "config.yaml").write_text("prot: 8000\n")
    found = quire("serve", "--config", str(tmp_path / "config.yaml"))
    assert found.returncode == 2 and "'prot'" in found.stderr
    (tmp_path / "empty").write_text("# nothing\n")
    found = quire("serve", "demo", "--api-key-file", str(tmp_path / "empty"))
    assert found.returncode == 2 and "no key" in found.stderr
    found = quire("serve", "demo", "--max-waiting", "0")
    assert found.returncode == 2 and "max_waiting" in found.stderr
    for text in (found.stderr, found.stdout):
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--ssl-certfile", "no.pem", "--ssl-keyfile", "no.key"),
            "no.pem and ssl_keyfile no.key fails: No such",
        ),
        (("--chat-template", "{{ oops("), "chat_template: the chat template is not valid Jinja (line 1)"),
        (("--host", "256.0.0.1"), "choose another --host"),
        (("--model", "demo-draft"), "two models are named, demo and --model demo-draft"),
        (("--api-key", ""), "api_key must not be empty"),
        (("--api-key", "schlüssel"), "other than printable ASCII"),
        (("--served-model-name", ""), "served_model_name must not be empty"),
        (("--request-timeout", "0"), "request_timeout must be greater than 0"),
    ],
)
def test_settings_that_are_wrong_in_themselves(flags: tuple[str, ...], message: str) -> None:
    found = quire("serve", "demo", "--dry-run", "--port", "0", *flags)
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr


def test_config_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: demo\ndry-run: true\nserved_model_name: [one, two]\nstrict: true\nclose_objects: false\n"
        "max-num-seqs: 7\nmax_body_bytes: 1000\n"
    )
    with serving("--config", str(file), "--max-num-seqs", "5") as server:
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["one", "two"]
        assert server.post(CHAT, chat("Hi", model="two")).json()["model"] == "two"
        assert server.post(CHAT, chat("Hi")).json()["model"] == "one"
        assert server.post(CHAT, chat("Hi", model="demo")).status_code == 404
        assert server.stats()["engine"]["max_num_seqs"] == 5
        strict = server.post(CHAT, chat("Hi", nonsense=1))
        assert strict.status_code == 400 and strict.json()["error"]["param"] == "nonsense"
        strict = server.post(CHAT, chat("Hi", guided_json={"type": "integer", "nonsense": 1}))
        assert strict.status_code == 400 and strict.json()["error"]["param"] == "guided_json"
        assert "'nonsense' at # has no effect (the server runs with --strict)" in strict.text
        large = server.post(CHAT, chat("x" * 2000))
        assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"

        def pieces():  # no content-length
            for _ in range(100):
                yield b" " * 100

        assert server.post_bytes(CHAT, pieces()).status_code == 413
        assert "this machine only; use --host 0.0.0.0" in server.output


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file name=filed weight=2\n")
    flags = ["demo", "--dry-run", "--api-key", "from-flag", "also-flag", "--api-key-file", str(file)]
    flags += ["--served-model-name", "one", "two", "one"]
    with serving(*flags, env={"QUIRE_API_KEY": "from-env,also-env"}) as server:
        opened = server.http.get("/v1/models", headers={"Authorization": "Bearer also-flag"})
        assert [card["id"] for card in opened.json()["data"]] == ["one", "two"]
        for key in ("from-flag", "also-flag", "from-file", "from-env", "also-env"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert server.post(CHAT, chat("Hi"), headers=headers).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "from-flag"},
            {"x-api-key": "ü"},
        ):
            raw = {name: value.encode() for name, value in headers.items()}
            answer = server.post(CHAT, chat("Hi"), headers=raw)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
            wrong = headers.get("x-api-key") or "Bearer" in headers.get("Authorization", "")
            says = "the API key is not accepted" if wrong else "send the header `Authorization: Bearer KEY`"
            assert says in answer.json()["error"]["message"]
        for path in ("/stats", "/v1/models", "/version", "/nowhere"):
            assert server.http.get(path).status_code == 401
        anthropic = server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert anthropic.status_code == 401 and anthropic.json()["type"] == "error"
        for path in ("/health", "/healthz", "/ping"):
            assert server.http.get(path).status_code == 200
        assert "from-" not in server.output


def test_cors_is_off_until_asked_for(dry: Server) -> None:
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in dry.http.get("/health", headers=headers).headers
    assert dry.http.options(CHAT, headers=headers).status_code == 403
    flags = ["--allowed-origins", "http://page.example", "--api-key", "k"]
    with serving("demo", "--dry-run", *flags) as server:
        preflight = server.http.options(CHAT, headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        answer = server.post(CHAT, chat("Hi"), headers={"Origin": "http://page.example"})
        assert answer.status_code == 401 and "access-control-allow-origin" in answer.headers
        other = server.http.get("/health", headers={"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_full_disk_for_its_output_does_not_stop_it() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quire", "serve", *SLOW, "--port", "0", "--log-level", "debug"]
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        deadline = time.monotonic() + 60
        while not (port := listens_at(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port}"
        assert httpx.post(url + TEXT, json={"prompt": "a b", "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    with serving("demo", "--dry-run", "--ssl-keyfile", str(key), "--ssl-certfile", str(cert)) as server:
        assert server.url.startswith("https://")
        assert server.post(CHAT, chat("Hi")).status_code == 200
    found = quire("serve", "demo", "--dry-run", "--ssl-keyfile", str(key))
    assert found.returncode == 2 and "ssl_certfile" in found.stderr
    for wrong in (key, tmp_path / "nowhere"):
        found = quire("serve", "demo", "--dry-run", "--ssl-keyfile", str(key), "--ssl-certfile", str(wrong))
        assert found.returncode == 2 and f"ssl_certfile {wrong}" in found.stderr
        assert "Traceback" not in found.stderr and "serving on" not in found.stdout


# --------------------------------------------------------------------------------------------- end


def test_sigterm_lets_open_requests_finish() -> None:
    with serving(*SLOW) as server:
        open_one = Background(server, {**LONG, "max_tokens": 300, "stream": True})
        wait_until_active(server, 1)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: "quire: stopping" in server.output)
        refused = httpx.post(server.url + TEXT, json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(server.url + "/health").status_code == 503
        chunks = events(open_one.result())
        assert chunks[-1] == "[DONE]" and chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_what_is_open_after_the_shutdown_timeout_ends_with_an_error() -> None:
    with serving(*SLOW, "--shutdown-timeout", "0.5") as server:
        streamed = Background(server, {**LONG, "max_tokens": 1000, "stream": True})
        whole = Background(server, {**LONG, "max_tokens": 1000})
        wait_until_active(server, 2)
        server.signal(signal.SIGTERM)
        *chunks, error, done = events(streamed.result())
        assert chunks and error["error"]["code"] == "shutting_down" and done == "[DONE]"
        assert whole.result().status_code == 503
        assert server.wait() == 0


def test_a_second_signal_stops_at_once() -> None:
    with serving(*SLOW) as server:
        open_one = Background(server, {**LONG, "max_tokens": 1000, "stream": True})
        wait_until_active(server, 1)
        server.signal(signal.SIGINT)
        server.wait_for(lambda: "quire: stopping" in server.output)
        server.signal(signal.SIGINT)
        assert server.wait(15) == 130, "the request would take 20 s, and might"
        assert "shutting_down" in open_one.result().text


def test_a_dead_engine_fails_every_request_and_ends_the_server() -> None:
    with serving(*SLOW) as server:
        streamed = Background(server, {**LONG, "max_tokens": 1000, "stream": True})
        whole = Background(server, {**LONG, "max_tokens": 1000})
        wait_until_active(server, 2)
        told = UnhealthyAnswers(server)
        subprocess.run(["kill", "-9", str(server.engine_pid())], check=True)
        *chunks, error, done = events(streamed.result())
        assert chunks and "exit code -9" in error["error"]["message"] and done == "[DONE]"
        assert whole.result().status_code == 500 and "engine" in whole.result().json()["error"]["message"]
        health, refused = told.result()
        assert health.status_code == 503 and "exit code -9" in health.json()["cause"]
        assert refused.status_code == 500
        assert server.wait() == 1
        assert "quire: the engine stopped: its process ended with exit code -9" in server.output


def test_the_engine_ends_with_the_server() -> None:
    with serving(*SLOW) as server:
        pid = server.engine_pid()
        server.signal(signal.SIGKILL)
        server.wait()
        server.wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_ctrl_c_while_the_model_loads() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", "demo", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not psutil.Process(process.pid).children():  # the engine process has been started
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in output
