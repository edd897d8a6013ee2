"""The `quire` command: run a sub-command, and turn errors into one sentence and an exit code.

A sub-command is imported when it is chosen, so `quire --help` answers at once.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import logging
import os
import sys

from quire import __version__
from quire.cli.interrupt import INTERRUPTED, interruptible
from quire.types import ConfigError, QuireError, RequestError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMMANDS = {
    "chat": "talk with a model in the terminal",
    "generate": "answer a prompt, a file of prompts or standard input",
    "serve": "serve a model over HTTP, with the OpenAI and Anthropic APIs",
    "rank": "lend the GPUs of this host to an engine on another one",
    "doctor": "show what this machine has, what Quire will use, and why",
    "models": "list the models on this machine, with size and format",
    "pull": "download a model from Hugging Face",
    "rm": "delete downloaded models",
    "bench": "measure throughput, latency and start-up on this machine",
    "plan": "find the rate that this machine sustains within latency targets, by simulation",
    "ladder": "climb from naive decoding to the full engine, and measure what every idea buys",
    "quantize": "write a quantised copy of a checkpoint",
    "profile": "show where the time of a step and the memory go",
    "completion": "print the completion of a shell: bash, zsh or fish",
}
ALIASES = {
    "run": "chat",
    "list": "models",
    "ls": "models",
    "remove": "rm",
    "download": "pull",
    "server": "serve",
}

_EXAMPLES = """examples:
  quire chat Qwen/Qwen3-0.6B
  quire generate demo "Once upon a time"
  quire generate model.gguf --temperature 0 --json < prompts.txt
  quire serve demo --port 8000

`quire COMMAND --help` lists the flags of a command. `quire run MODEL` is the same as `quire chat MODEL`."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Returns:
        0 for success; 1 for an error; 2 for a wrong command line, setting or prompt; 130 after Ctrl-C; 141 if the reader
        of the output is gone.
    """
    _open_streams()
    with interruptible(last=argv is None):
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, because errors of the last write are caught below
        return code
    except (ConfigError, RequestError) as error:
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
        if error.filename is not None and error.strerror:
            print(f"quire: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
            return 1
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"quire: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: list[str]) -> int:
    name, *rest = argv or ["help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("help", "-h", "--help"):
        print(_overview())
        return 0
    if name in ("version", "-v", "-V", "--version"):
        print(f"quire {__version__}")
        return 0
    command = ALIASES.get(name, name)
    if command not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return 2
    _set_up_logging(os.environ.get("QUIRE_LOG_LEVEL", "warning"))
    from quire.cli.parser import CommandParser

    module = importlib.import_module(f"quire.cli.{command}")
    parser = CommandParser(prog=f"quire {command}", description=_sentence(COMMANDS[command]))
    module.add_arguments(parser)
    code: int = module.run(parser.parse(rest))
    return code


def _unknown(name: str) -> str:
    """Return the message for a word that is no command: the nearest ones, and the list."""
    near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1, 0.5)
    if name.startswith("-"):
        advice = f"flags follow the command: `quire COMMAND {name}`"
    elif near:
        advice = f"did you mean `quire {near[0]}`?"
    else:
        advice = "the commands are:"
    what = "flag" if name.startswith("-") else "command"
    return f"quire: error: there is no {what} {name!r}; {advice}\n\n{_list()}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _list() -> str:
    return "\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())


def _overview() -> str:
    head = "Quire: a fast, readable LLM inference engine.\n\nusage: quire COMMAND [MODEL] [flags]"
    flags = "  -h, --help  show this list\n  -v, --version  show the version"
    return f"{head}\n\ncommands:\n{_list()}\n\nflags:\n{flags}\n\n{_EXAMPLES}"


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
