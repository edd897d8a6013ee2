"""`quire chat` without a model: conversations, slash commands, servers, and the terminal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.conversation.commands import SETTABLE, SlashCommands
from quire.cli.conversation.screen import MarkdownAnswer, TerminalScreen, finished_blocks
from quire.cli.conversation.sources import AnswerFigures, RemoteModel, ServerFailed
from quire.cli.conversation.state import Conversation
from quire.cli.main import main
from quire.types import ConfigError, RequestError


def talk(*turns: str) -> Conversation:
    conversation = Conversation(None, {})
    for text in turns:
        conversation.ask(text)
        conversation.answer(f"answer to {text}")
    return conversation


def commands(conversation: Conversation, agrees: bool = True) -> SlashCommands:
    return SlashCommands(conversation, lambda question: agrees)


def test_undo_and_regenerate_take_the_last_turn() -> None:
    conversation = talk("one", "two")
    run = commands(conversation).run
    assert run("/regenerate").send == "two" and [m["content"] for m in conversation.turns] == [
        "one",
        "answer to one",
    ]
    assert run("/undo").text == "Removed: one" and not conversation.turns
    assert run("/undo").text == "There is nothing to undo." and run("/retry").send is None


def test_set_parses_as_flags_do() -> None:
    conversation = talk()
    run = commands(conversation).run
    for line, says in (
        ("/set temperature 0.5", "temperature is 0.5."),
        ("/set --max-tokens 2k", "max_tokens is 2048."),
        ("/set ignore_eos on", "ignore_eos is True."),
        ("/set stop END", "stop is ['END']."),
        ('/set logit_bias {"5": 1}', "logit_bias is {'5': 1}."),
        ("/set temperature hot", "temperature cannot be 'hot'."),
        ("/set temperature -1", "/set temperature: temperature must be in"),
        ("/set temperatur 1", "There is no field temperatur: did you mean temperature?."),
        ("/set n 2", "There is no field n"),
        ("/set seed", "/set seed needs a value, or `default`."),
        ("/set seed default", "seed has its default."),
    ):
        assert run(line).text.startswith(says), line
    assert conversation.fields == {
        "temperature": 0.5, "max_tokens": 2048, "ignore_eos": True, "stop": ["END"], "logit_bias": {"5": 1}
    }  # fmt: skip
    assert "temperature=0.5" in run("/set").text and all(name in run("/set").text for name in SETTABLE)


def test_a_saved_conversation_is_loaded_again(tmp_path: Path) -> None:
    conversation, file = talk("one"), tmp_path / "talk.json"
    conversation.system, conversation.fields = "Be brief.", {"temperature": 0.0}
    assert commands(conversation).run(f"/save {file}").text == f"Saved 2 messages to {file}."
    other = talk("else")
    assert commands(other, agrees=False).run(f"/load {file}").text == "Nothing was loaded."
    assert commands(other).run(f"/load {file}").text == f"Loaded 2 messages from {file}."
    assert (other.messages, other.fields) == (conversation.messages, conversation.fields)
    assert commands(other, agrees=False).run(f"/save {file}").text == "Nothing was saved."


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "is not a JSON file"),
        ("{}", "a list `messages` is missing"),
        ('[{"role": "user"}]', "message 0 has no text"),
        ('[{"role": "tool", "content": "x"}]', "message 0 has the role 'tool'"),
        ('{"messages": [], "sampling": {"temperature": -1}}', "temperature must be in"),
        ('{"messages": [], "sampling": {"heat": 1}}', "heat"),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    conversation = talk("one")
    assert says in commands(conversation).run(f"/load {file}").text
    assert len(conversation.turns) == 2, "nothing changes"


def test_commands_confirm_and_suggest() -> None:
    conversation = talk("one")
    run = commands(conversation).run
    assert run("/system Be brief.").text == "System message set: Be brief."
    assert run("/reset").text == "New conversation. The system message stays." and not conversation.turns
    assert run("/sytem x").text == "There is no command /sytem. Did you mean /system? /help lists all."
    assert run("/save").text == "/save needs the name of a file." and run("/bye").ends
    assert all(name in run("/help").text for name in ("/regenerate", "/undo", "/set", "Alt-Enter"))


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\n", "one\n\n"),
        ("one\n\ntwo\n", "one\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nrest", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n", ""),
    ],
)
def test_blocks_that_are_finished(text: str, finished: str) -> None:
    assert text[: finished_blocks(text)] == finished


def test_an_answer_is_rendered_block_by_block() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), force_terminal=True, width=40)
    text = "# Title\n\nSome **bold** text.\n\n```python\nx = 1\n\ny = 2\n```\n\n- item\n"
    with MarkdownAnswer(console) as answer:
        for letter in text:
            answer.write(letter)
    shown = console.file.getvalue()
    assert "\x1b[1mbold\x1b[0m" in shown and "**" not in shown.rsplit("Title", 1)[1] and " • \x1b" in shown


def test_the_terminal_takes_several_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda **_: DummyOutput())
    with create_pipe_input() as keys, create_app_session(input=keys):
        screen = TerminalScreen(["/help"])
        keys.send_text("one\x1b\rtwo\r")  # Alt-Enter, Enter
        assert screen.read() == "one\ntwo"
        keys.send_text("\x1b[200~a paste\nof two lines\x1b[201~\r")
        assert screen.read() == "a paste\nof two lines"
        keys.send_text("garbage\x03good\r")  # Ctrl-C clears
        assert screen.read() == "good"
        keys.send_text("\x1b[A\x1b[A\r")  # the history
        assert screen.read() == "a paste\nof two lines"
        keys.send_text("\x04")
        assert screen.read() is None
    file = tmp_path / "quire" / "chat_history"
    assert "of two lines" in file.read_text() and file.stat().st_mode & 0o77 == 0


# ---------------------------------------------------------------------------------------- servers


class Stand(BaseHTTPRequestHandler):
    """A server with OpenAI's API that answers with the last message, word by word, or as `mode` says."""

    mode = "answer"
    bodies: list[dict[str, Any]] = []  # noqa: RUF012  one server at a time

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "echo"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({**body, "key": self.headers["Authorization"]})
        if self.mode == "refuse":
            return self._send(400, b'{"error": {"message": "temperature must be between 0 and 100"}}')
        words = body["messages"][-1]["content"].split(" ")
        events: list[Any] = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        events += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(words)}}]
        if self.mode == "fail":
            events = [events[0], {"error": {"message": "the engine died"}}]
        end = "" if self.mode == "cut" else "data: [DONE]\n\n"
        return self._send(200, ("".join(f"data: {json.dumps(one)}\n\n" for one in events) + end).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Stand.mode, Stand.bodies = "answer", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stand)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_chat_with_a_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there\n/set temperature 0\nagain\n"))
    assert main(["chat", "--url", f"{url}/v1", "--system", "Echo."]) == 0
    out, err = capsys.readouterr()
    assert out == "hello there \nagain \n" and "2 tokens," in err and "temperature is 0.0." in err
    first, second = Stand.bodies
    assert first["model"] == "echo" and first["key"] == "Bearer secret" and first["stream"] is True
    assert second["temperature"] == 0 and [m["role"] for m in second["messages"]] == [
        "system", "user", "assistant", "user"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "error", "says"),
    [
        ("refuse", RequestError, "answered 400: temperature must be between"),
        ("fail", ServerFailed, "the engine died"),
        ("cut", ServerFailed, "closed the connection before the end"),
    ],
)
def test_a_server_that_fails(url: str, mode: str, error: type[Exception], says: str) -> None:
    model = RemoteModel(url.removeprefix("http://"), None)
    Stand.mode = mode
    with pytest.raises(error, match=says):
        list(model.stream([{"role": "user", "content": "a b"}], {}, AnswerFigures()))


def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be the address of a server"):
        RemoteModel("ftp://x", None)
    with pytest.raises(ServerFailed, match=r"no server answers at http://127\.0\.0\.1:1"):
        RemoteModel("127.0.0.1:1", None)
    assert main(["chat", "--url", url, "--dtype", "float32"]) == 2
