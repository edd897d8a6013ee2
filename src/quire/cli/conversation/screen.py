"""Where a chat reads and writes: a terminal with editing, history, colours and Markdown, or plain pipes.

prompt_toolkit and rich are imported only for a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from quire.cli.conversation.commands import KEYS

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

_REFRESH_S = 0.06
_FENCES = ("```", "~~~")


class AnswerWriter(Protocol):
    """The place of one answer on a screen. A context manager; leaving it ends the answer."""

    def __enter__(self) -> AnswerWriter: ...

    def __exit__(self, *_: Any) -> None: ...

    def write(self, text: str) -> None:
        """Append a piece of the answer."""
        ...


class Screen(Protocol):
    """Input and output of a chat. Errors and Ctrl-C end one that is not `interactive`."""

    interactive: bool

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        ...

    def note(self, text: str) -> None:
        """Show a line that is not part of an answer."""
        ...

    def confirm(self, question: str) -> bool:
        """Return whether the user agrees."""
        ...

    def answer(self) -> AnswerWriter:
        """Return the writer of the next answer."""
        ...


class PlainAnswer:
    """An answer on standard output as it comes."""

    def __enter__(self) -> PlainAnswer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        print(flush=True)

    def write(self, text: str) -> None:
        """Print a piece of the answer."""
        print(text, end="", flush=True)


class PipeScreen:
    """A chat without a terminal: one message per line of standard input, and only answers on standard output."""

    interactive = False

    def read(self) -> str | None:
        """Return the next line, or None at the end."""
        line = sys.stdin.readline()
        return line.strip() if line else None

    def note(self, text: str) -> None:
        """Print a line to standard error."""
        print(text, file=sys.stderr, flush=True)

    def confirm(self, question: str) -> bool:
        """Return True: a script needs no confirmation."""
        return True

    def answer(self) -> AnswerWriter:
        """Return a writer to standard output."""
        return PlainAnswer()


class TerminalScreen:
    """A chat in a terminal.

    Args:
        commands: names of the slash commands, to complete.
    """

    interactive = True

    def __init__(self, commands: Iterable[str]) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._session = _session(list(commands))

    def read(self) -> str | None:
        """Return the next message, which may have several lines, or None after Ctrl-D."""
        try:
            text: str = self._session.prompt("> ")
            return text.strip()
        except EOFError:
            return None
        except KeyboardInterrupt:  # Ctrl-C on an empty line
            self.note("Ctrl-D or /quit ends the chat.")
            return ""

    def note(self, text: str) -> None:
        """Print a dim line."""
        self._console.print(text, style="dim", markup=False)

    def confirm(self, question: str) -> bool:
        """Ask on the terminal; only y and yes agree."""
        try:
            return self._console.input(f"{question} (y/N) ", markup=False).strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            return False

    def answer(self) -> AnswerWriter:
        """Return a writer that renders Markdown, or plain text for a terminal that cannot move its cursor."""
        if not sys.stdout.isatty() or self._console.is_dumb_terminal:
            return PlainAnswer()
        return MarkdownAnswer(self._console)


class MarkdownAnswer:
    """An answer rendered as Markdown.

    Finished blocks are printed once. Only the unfinished block is redrawn, so long answers cost no more per token than
    short ones, and scroll.
    """

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console, self._text, self._drawn_s = console, "", 0.0
        self._between = ""  # the empty line before every block but the first
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> MarkdownAnswer:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update("", refresh=True)
        self._live.__exit__(kind, error, traceback)
        self._print(self._text)

    def write(self, text: str) -> None:
        """Append a piece of the answer, print the blocks that it completes, and redraw the rest."""
        self._text += text
        if end := finished_blocks(self._text):
            self._print(self._text[:end])
            self._text = self._text[end:]
        if (now_s := time.monotonic()) - self._drawn_s > _REFRESH_S:
            self._drawn_s = now_s
            self._live.update(self._unfinished(), refresh=True)

    def _unfinished(self) -> Any:
        """Return the last lines of the unfinished block, as many as fit."""
        from rich.text import Text

        lines = Text(self._text).wrap(self._console, self._console.width)
        return Text("\n").join(lines[-max(self._console.height - 2, 1) :])

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if text.strip():
            self._console.print(self._between, Markdown(text.strip("\n")), sep="", end="")
            self._between = "\n"


def finished_blocks(text: str) -> int:
    """Return the length of the Markdown blocks at the beginning of `text` that later text cannot change.

    A block ends at an empty line outside of a code block.
    """
    end, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        begin = line.strip()[:3]
        if begin in _FENCES and fence in ("", begin):
            fence = "" if fence else begin
        elif not fence and not line.strip() and line.endswith("\n"):
            end = at
    return end


def _session(commands: list[str]) -> PromptSession[str]:
    """Return a prompt with history, completion of commands, and several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import FuzzyWordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    is_command = Condition(lambda: session.default_buffer.text.startswith("/"))

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    session: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=keys,
        history=_history(),
        completer=FuzzyWordCompleter(commands),
        complete_while_typing=is_command,
        prompt_continuation=lambda width, number, wrapped: "." * (width - 1) + " ",
        output=create_output(always_prefer_tty=True),
    )
    return session


def _history() -> History:
    """Return the history of all chats, or one of this chat if its file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(home) / "quire" / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
        file.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def make_screen(commands: Iterable[str]) -> Screen:
    """Return a terminal if standard input is one, else pipes."""
    return TerminalScreen(commands) if sys.stdin.isatty() else PipeScreen()


WELCOME = f"/help lists the commands. {KEYS}."
