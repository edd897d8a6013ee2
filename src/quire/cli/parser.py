"""The argument parser of every command: help that lists each switch once, and errors that suggest a flag."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from quire.cli.flags import FlagFormatter


class CommandParser(argparse.ArgumentParser):
    """Argument parser whose errors say what is wrong and suggest a flag, without a usage of a hundred flags."""

    def __init__(self, **options: Any) -> None:
        options = {"formatter_class": FlagFormatter, "allow_abbrev": False, **options}
        super().__init__(**options)

    def format_help(self) -> str:
        """Return the help, with a usage that names only the words: the flags are listed below."""
        self._shorten_usage()
        return super().format_help()

    def _shorten_usage(self) -> None:
        if self.usage is None:
            formatter = self._get_formatter()
            words = [
                formatter._format_args(a, str(a.metavar or a.dest)) for a in self._get_positional_actions()
            ]
            self.usage = " ".join(["%(prog)s", *words, "[flags]"])

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse the arguments of a command. Words and flags may be in any order, except before a kind of benchmark."""
        self._shorten_usage()
        has_kinds = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        return self.parse_args(argv) if has_kinds else self.parse_intermixed_args(argv)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a message that names the nearest flag."""
        from quire.cli.elsewhere import hint

        flags = [flag for action in self._actions for flag in action.option_strings if "_" not in flag]
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
        if not unknown.startswith("--no-"):  # the opposite of a flag is similar too
            flags = [flag for flag in flags if not flag.startswith("--no-")]
        is_flag = message.startswith("unrecognized") and unknown.startswith("-")
        near = difflib.get_close_matches(unknown, flags, 1, 0.8) if is_flag else []
        known = (hint(unknown) if is_flag else None) or (f"did you mean {near[0]}?" if near else "")
        more = f"; {known}" if known else ""
        self.exit(2, f"{self.prog}: error: {message}{more}\n`{self.prog} --help` lists the flags\n")
