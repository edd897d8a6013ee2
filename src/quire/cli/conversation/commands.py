"""The slash commands of `quire chat`. Each returns a confirmation for the user, or text to send to the model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from quire.cli.conversation.state import Conversation, check_fields
from quire.cli.flags import parse_field
from quire.types import RequestError, SamplingParams

_NOT_SETTABLE = {"n", "detokenize", "structured_outputs"}
SETTABLE = tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_SETTABLE)
KEYS = "Enter sends, Alt-Enter starts a new line, Ctrl-C clears the line or stops an answer, Ctrl-D exits"


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a command: a confirmation, a message to send again, or the end of the chat."""

    text: str = ""
    send: str | None = None
    ends: bool = False


class SlashCommands:
    """The commands on one conversation.

    Args:
        confirm: asks the user a question and returns whether the answer was yes.
    """

    def __init__(self, conversation: Conversation, confirm: Callable[[str], bool]) -> None:
        self._talk, self._confirm = conversation, confirm
        # Command, argument, description, function; aliases follow the first name.
        self._table: list[tuple[tuple[str, ...], str, str, Callable[[str], Reply]]] = [
            (("/help", "/?"), "", "show this list", self._help),
            (("/regenerate", "/retry"), "", "answer the last message again", self._regenerate),
            (("/undo",), "", "remove the last message and its answer", self._undo),
            (("/reset", "/clear", "/new"), "", "start a new conversation", self._reset),
            (("/system",), "[TEXT]", "set the system message; without a text, remove it", self._system),
            (
                ("/set",),
                "[NAME VALUE]",
                "set a sampling field, such as temperature 0; VALUE default unsets it",
                self._set,
            ),
            (("/save",), "FILE", "write the conversation to a file", self._save),
            (("/load",), "FILE", "continue the conversation in a file", self._load),
            (("/quit", "/exit", "/bye"), "", "end the chat, as Ctrl-D does", self._quit),
        ]

    @property
    def names(self) -> list[str]:
        """Return the names of all commands."""
        return [name for names, *_ in self._table for name in names]

    def run(self, line: str) -> Reply:
        """Run the command in `line`. A mistake is explained in the reply."""
        name, _, argument = line.strip().partition(" ")
        for names, _, _, function in self._table:
            if name in names:
                try:
                    return function(argument.strip())
                except RequestError as error:
                    return Reply(f"{error}.")
        near = difflib.get_close_matches(name, self.names, 1, 0.5)
        return Reply(
            f"There is no command {name}. "
            + (f"Did you mean {near[0]}? " if near else "")
            + "/help lists all."
        )

    def _help(self, argument: str) -> Reply:
        lines = [f"  {f'{names[0]} {argument}':<22} {text}" for names, argument, text, _ in self._table]
        return Reply("\n".join([*lines, f"{KEYS}."]))

    def _regenerate(self, argument: str) -> Reply:
        text = self._talk.undo()
        return Reply("There is no message to answer again.") if text is None else Reply(send=text)

    def _undo(self, argument: str) -> Reply:
        text = self._talk.undo()
        return Reply("There is nothing to undo." if text is None else f"Removed: {_short(text)}")

    def _reset(self, argument: str) -> Reply:
        self._talk.reset()
        return Reply("New conversation." + (" The system message stays." if self._talk.system else ""))

    def _system(self, argument: str) -> Reply:
        self._talk.system = argument or None
        return Reply(f"System message set: {_short(argument)}" if argument else "System message removed.")

    def _set(self, argument: str) -> Reply:
        name, _, value = argument.partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if not name:
            given = ", ".join(f"{name}={value}" for name, value in self._talk.fields.items()) or "nothing"
            return Reply(
                f"Set: {given}. The others have the model's defaults. Fields: {', '.join(SETTABLE)}."
            )
        if name not in SETTABLE:
            near = difflib.get_close_matches(name, SETTABLE, 1, 0.5)
            more = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(SETTABLE)}"
            raise RequestError(f"There is no field {name}: {more}")
        value = value.strip()
        if not value:
            raise RequestError(f"/set {name} needs a value, or `default`")
        if value == "default":
            self._talk.fields.pop(name, None)
            return Reply(f"{name} has its default.")
        changed = {**self._talk.fields, name: parse_field(SamplingParams, name, value)}
        check_fields(changed, f"/set {name}")
        self._talk.fields = changed
        return Reply(f"{name} is {changed[name]}.")

    def _save(self, argument: str) -> Reply:
        path = _path(argument, "/save")
        if path.exists() and not self._confirm(f"{path} exists. Replace it?"):
            return Reply("Nothing was saved.")
        self._talk.save(path)
        return Reply(f"Saved {len(self._talk.turns)} messages to {path}.")

    def _load(self, argument: str) -> Reply:
        path = _path(argument, "/load")
        if self._talk.turns and not self._confirm("Replace the current conversation?"):
            return Reply("Nothing was loaded.")
        self._talk.load(path)
        return Reply(f"Loaded {len(self._talk.turns)} messages from {path}.")

    def _quit(self, argument: str) -> Reply:
        return Reply(ends=True)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
