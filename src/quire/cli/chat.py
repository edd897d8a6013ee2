"""`quire chat`: a conversation in the terminal or through pipes, with a model here or on a server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from quire.cli.conversation.commands import SlashCommands
from quire.cli.conversation.screen import WELCOME, PipeScreen, Screen, make_screen
from quire.cli.conversation.sources import AnswerFigures, AnswerSource, LocalModel, RemoteModel, ServerFailed
from quire.cli.conversation.state import Conversation
from quire.cli.flags import DEFAULT_MAX_TOKENS, add_flags, engine_settings, given, split_model
from quire.cli.loading import open_model
from quire.config import EngineConfig
from quire.types import ConfigError, RequestError, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire chat`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [MESSAGE]",
        help="model to talk with (default: demo), and a message to answer before the command ends",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--url",
        help="address of a server to talk to instead of loading a model, such as http://127.0.0.1:8000; MODEL is then a "
        "name that it serves, and OPENAI_API_KEY its key",
    )
    add_flags(parser, "engine", EngineConfig)
    skip, defaults = {"detokenize", "n"}, {"max_tokens": DEFAULT_MAX_TOKENS}
    add_flags(parser, "sampling", SamplingParams, skip=skip, defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Run the conversation and return the exit code."""
    messages = split_model(args.words, args, always=True)
    fields = given(args, SamplingParams)
    SamplingParams(**fields)  # so that a mistake shows before the model loads
    conversation = Conversation(args.system, fields)
    with _source(args) as source:
        if messages:
            _turn(source, PipeScreen(), conversation, " ".join(messages))
        else:
            _talk(source, conversation)
    return 0


@contextlib.contextmanager
def _source(args: argparse.Namespace) -> Iterator[AnswerSource]:
    """Open the model that the flags describe.

    Raises:
        ConfigError: if --url is combined with settings of an engine.
    """
    settings = engine_settings(args)
    if args.url is None:
        with open_model(settings) as llm:
            yield LocalModel(llm)
        return
    if others := [name for name in settings if name != "model"]:
        raise ConfigError(
            f"--url talks to a running server: leave out {', '.join(others)}, which it has already"
        )
    yield RemoteModel(args.url, settings.get("model"))


def _talk(source: AnswerSource, conversation: Conversation) -> None:
    """Read messages and commands, and answer them, until the user ends the chat."""
    commands = SlashCommands(conversation, lambda question: screen.confirm(question))
    screen = make_screen(commands.names)
    if screen.interactive:
        screen.note(f"{source.title}. {WELCOME}")
    while (line := screen.read()) is not None:
        if line.startswith("/"):
            reply = commands.run(line)
            if reply.ends:
                return
            if reply.text:
                screen.note(reply.text)
            line = reply.send or ""
        if line:
            _turn(source, screen, conversation, line)


def _turn(source: AnswerSource, screen: Screen, conversation: Conversation, text: str) -> None:
    """Send a message and show its answer. If there is none, the conversation does not change."""
    conversation.ask(text)
    figures, pieces, stopped = AnswerFigures(), [], False
    stream: Any = source.stream(conversation.messages, conversation.fields, figures)
    try:
        with contextlib.closing(stream), screen.answer() as answer:
            for piece in stream:
                pieces.append(piece)
                answer.write(piece)
    except KeyboardInterrupt:
        if not screen.interactive:
            raise
        stopped = True
    except (RequestError, ServerFailed) as error:
        conversation.undo()
        if not screen.interactive:
            raise
        screen.note(f"{error}.")
        return
    if not pieces:
        conversation.undo()
        screen.note("Stopped.")
        return
    conversation.answer("".join(pieces))
    screen.note(f"[{figures.text()}{'; stopped' if stopped else ''}]")
