"""`quire chat`: a conversation in the terminal. Each turn shows what the prefix cache saved."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from quire.cli.flags import add_flags, given
from quire.config import EngineConfig
from quire.types import RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

_MAX_TOKENS = 1024
_HELP = (
    "/reset starts over, /system TEXT sets the system message, /quit or Ctrl-D ends; Ctrl-C stops an answer"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system message")
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "sampling", SamplingParams, skip={"detokenize", "n"})


def run(args: argparse.Namespace) -> int:
    from quire.llm import LLM

    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows' console has its own
            import readline  # noqa: F401  line editing and history for input()
    with LLM(**given(args, EngineConfig)) as llm:
        params = llm.default_params(given(args, SamplingParams), _MAX_TOKENS)
        print(f"{llm.info.model} on {llm.info.device}. {_HELP}.")
        messages = _start(args.system)
        while (line := _ask()) is not None:
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                messages = _start(args.system)
            elif line.startswith("/system"):
                args.system = line.removeprefix("/system").strip() or None
                messages = _start(args.system)
            elif line.startswith("/"):
                print(_HELP)
            elif line:
                _turn(llm, params, messages, line)
    return 0


def _start(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _ask() -> str | None:
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return None


def _turn(llm: LLM, params: SamplingParams, messages: list[dict[str, Any]], line: str) -> None:
    """One question and its answer; a refused question leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    began, shown, output = time.perf_counter(), 0, None
    try:
        for output in llm.stream(llm.chat_prompt(messages), params):
            print(output.outputs[0].text[shown:], end="", flush=True)
            shown = len(output.outputs[0].text)
    except RequestError as error:
        messages.pop()
        print(f"{error}; /reset starts over")
        return
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    if output is None:
        messages.pop()
        return
    answer = output.outputs[0]
    messages.append({"role": "assistant", "content": answer.text})
    took = time.perf_counter() - began
    print(
        f"  [{len(answer.token_ids)} tokens, {len(answer.token_ids) / took:.0f} tokens/s; "
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the prefix cache]"
    )
