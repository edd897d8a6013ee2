"""`quire chat`: a conversation in the terminal. Each turn shows how many prompt tokens were cached."""

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
_HELP = "/reset starts a new conversation, /system TEXT also sets the system message, Ctrl-C stops an answer, /quit or Ctrl-D exits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire chat`."""
    parser.add_argument("--system", help="system message")
    add_flags(parser, "engine", EngineConfig)
    add_flags(parser, "sampling", SamplingParams, skip={"detokenize", "n"})


def run(args: argparse.Namespace) -> int:
    """Run the conversation and return the exit code."""
    from quire.llm import LLM

    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # the console of Windows edits lines itself
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
    """Send one message and print the answer. If the message is refused, the conversation does not change."""
    messages.append({"role": "user", "content": line})
    start_s, shown, output = time.perf_counter(), 0, None
    try:
        for output in llm.stream(llm.chat_prompt(messages), params):
            print(output.outputs[0].text[shown:], end="", flush=True)
            shown = len(output.outputs[0].text)
    except RequestError as error:
        messages.pop()
        print(f"{error}; /reset starts a new conversation")
        return
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    if output is None:
        messages.pop()
        return
    answer = output.outputs[0]
    messages.append({"role": "assistant", "content": answer.text})
    elapsed_s = time.perf_counter() - start_s
    print(
        f"  [{len(answer.token_ids)} tokens, {len(answer.token_ids) / elapsed_s:.0f} tokens/s; "
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the prefix cache]"
    )
