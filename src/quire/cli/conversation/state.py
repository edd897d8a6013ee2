"""A conversation: its messages and sampling fields, saved and loaded as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.types import QuireError, RequestError, SamplingParams

_ROLES = ("user", "assistant")


class Conversation:
    """The messages of a chat and the sampling fields that the user has set.

    A turn is a user message and its answer. After each turn the last message is an answer.
    """

    def __init__(self, system: str | None, fields: dict[str, Any]) -> None:
        self.system, self.fields = system, fields
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return all messages, the system message first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> None:
        """Append a user message."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Append the answer to the last user message."""
        self.turns.append({"role": "assistant", "content": text})

    def undo(self) -> str | None:
        """Remove the last user message with its answer, and return its text, or None without a turn."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                return str(message["content"])
        return None

    def reset(self) -> None:
        """Remove all turns. The system message and the fields stay."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the conversation to a JSON file.

        Raises:
            RequestError: if the file cannot be written.
        """
        content = {"messages": self.messages, "sampling": self.fields}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace everything by the content of a file that `save` wrote. A list of messages alone is accepted too.

        Raises:
            RequestError: if the file cannot be read or holds no conversation; nothing changes then.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise RequestError(f"{path} is not a JSON file") from None
        if isinstance(content, list):
            content = {"messages": content}
        if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
            raise RequestError(f"{path} holds no conversation: a list `messages` is missing")
        system, turns = _checked(path, content["messages"])
        fields = content.get("sampling", {})
        check_fields(fields, str(path))
        self.system, self.turns, self.fields = system, turns, fields


def check_fields(fields: Any, source: str) -> None:
    """Raise RequestError unless `fields` is an object of valid sampling fields."""
    if not isinstance(fields, dict):
        raise RequestError(f"{source}: `sampling` must be an object")
    try:
        SamplingParams(**fields)
    except (TypeError, QuireError) as error:
        raise RequestError(f"{source}: {error}") from None


def _checked(path: Path, messages: list[Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the system message and the turns of loaded messages. Raise RequestError if they are malformed."""
    system, turns = None, []
    for index, message in enumerate(messages):
        role, content = (
            message.get(key) if isinstance(message, dict) else None for key in ("role", "content")
        )
        if not isinstance(content, str):
            raise RequestError(f"{path}: message {index} has no text in `content`")
        if role == "system" and index == 0:
            system = content
        elif role in _ROLES:
            turns.append({"role": role, "content": content})
        else:
            raise RequestError(f"{path}: message {index} has the role {role!r}; it must be user or assistant")
    while turns and turns[-1]["role"] == "user":
        turns.pop()  # a question without an answer cannot be followed by another one
    return system, turns
