"""The `quire` command: run a sub-command, and turn errors into one sentence and an exit code.

A sub-command is imported when it is chosen, so `quire --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
from typing import NoReturn

from quire import __version__
from quire.cli.interrupt import INTERRUPTED, interruptible
from quire.types import ConfigError, QuireError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMMANDS = {
    "serve": "serve a model over HTTP, with the OpenAI and Anthropic APIs",
    "generate": "answer a prompt, a file of prompts or standard input",
    "chat": "talk with a model in the terminal",
    "doctor": "show what this machine has, what Quire will use, and why",
    "bench": "measure throughput, latency and start-up on this machine",
    "profile": "show where the time of a step and the memory go",
}

_EPILOG = """examples:
  quire generate "Once upon a time"
  quire chat --model Qwen/Qwen3-0.6B
  quire generate --model model.gguf --temperature 0 --json < prompts.txt

`quire COMMAND --help` lists the flags of a command."""


class _CommandParser(argparse.ArgumentParser):
    """Argument parser whose errors say what is wrong and suggest a flag, without a usage of a hundred flags."""

    def error(self, message: str) -> NoReturn:
        import difflib

        from quire.cli.elsewhere import hint

        flags = [flag for action in self._actions for flag in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
        if not unknown.startswith("--no-"):
            flags = [
                flag for flag in flags if not flag.startswith("--no-")
            ]  # the opposite of a flag is similar too
        near = difflib.get_close_matches(unknown, flags, 1, 0.8) if unknown.startswith("--") else []
        known = hint(unknown) or (f"did you mean {near[0]}?" if near else "")
        more = f"; {known}" if known else ""
        self.exit(2, f"{self.prog}: error: {message}{more}\n`{self.prog} --help` lists the flags\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Returns:
        0 for success, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 141 if the reader of the output is gone.
    """
    _open_streams()
    with interruptible(last=argv is None):
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> int:
    parser = _parser()
    if not argv or argv[0] not in COMMANDS:
        parser.parse_args(argv)  # --help, --version, or an error that lists the commands
        parser.print_help()
        return 2
    try:
        _set_up_logging(os.environ.get("QUIRE_LOG_LEVEL", "warning"))
        command = importlib.import_module(f"quire.cli.{argv[0]}")
        sub = _CommandParser(prog=f"quire {argv[0]}", description=COMMANDS[argv[0]], allow_abbrev=False)
        command.add_arguments(sub)
        code: int = command.run(sub.parse_args(argv[1:]))
        sys.stdout.flush()  # here, because errors of the last write are caught below
        return code
    except ConfigError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quire: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, as `| head` does
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"quire: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _open_streams() -> None:
    """Replace closed standard streams by empty ones, and make output replace characters that cannot be encoded."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open as long as the process
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Discard the rest of the output buffer, which can no longer be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_logging(level: str) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"QUIRE_LOG_LEVEL must be debug, info, warning or error, got {level!r}")
    logging.basicConfig(format="%(message)s", level=level.upper())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire",
        description="Quire: a fast, readable LLM inference engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    group = parser.add_argument_group("commands", commands)
    group.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS, metavar="COMMAND")
    return parser
