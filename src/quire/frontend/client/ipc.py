"""The messages between a client and an engine process: msgpack, token ids instead of text, one message per step."""

from __future__ import annotations

import msgspec

from quire.config import EngineConfig
from quire.types import (
    EngineInfo,
    EngineLive,
    EngineLoad,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    Figures,
    OutputPart,
)
from quire.types.block_names import NameChanges


class StartEngine(msgspec.Struct, tag=True):
    """Client to engine, first: the settings to build the engine from.

    With `dry_run_step_s` no model is loaded, and each step takes that many seconds (dry_run.py). `secret` is the key of
    the names of KV blocks, which the engines of one deployment share; None lets the engine pick one. `exports` is the
    descriptor of the memory in which a prefill engine shows its blocks.
    """

    config: EngineConfig
    dry_run_step_s: float | None = None
    secret: bytes | None = None
    exports: int | None = None


class Add(msgspec.Struct, tag=True):
    """Client to engine: run this request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Client to engine: end the requests with these ids."""

    ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Client to engine: answer with Stats, between two steps. `owner` is that of AskLive."""

    owner: str | None = None


class AskLive(msgspec.Struct, tag=True):
    """Client to engine: answer with Live, between two steps.

    `since` is the newest step that the client knows. If `owner` names an API client, only its requests are listed
    one by one; None lists all.
    """

    since: int
    owner: str | None = None


class Ping(msgspec.Struct, tag=True):
    """Client to engine: answer with Pong, between two steps."""


class StopEngine(msgspec.Struct, tag=True):
    """Client to engine, last: finish and exit."""


class EngineReady(msgspec.Struct, tag=True):
    """Engine to client: the engine is built and ready."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True):
    """Engine to client: the outputs of one step, and the engine's load and figures after it.

    `names` has changes of the blocks that the prefix cache can find, if there are several replicas.
    """

    parts: list[OutputPart]
    load: EngineLoad
    figures: Figures
    names: NameChanges = NameChanges()

    @property
    def outputs(self) -> EngineOutputs:
        """Return the outputs, which can be read one by one."""
        return EngineOutputs(self.parts)


class Stats(msgspec.Struct, tag=True):
    """Engine to client: its current figures."""

    stats: EngineStats


class Live(msgspec.Struct, tag=True):
    """Engine to client: the state of its requests and blocks, for the live view."""

    live: EngineLive


class Pong(msgspec.Struct, tag=True):
    """Engine to client: the answer to Ping, which shows that the engine is responsive."""


class EngineFailed(msgspec.Struct, tag=True):
    """Engine to client: the reason why the engine ends. `kind` is the name of the error class."""

    kind: str
    cause: str


ToEngine = StartEngine | Add | Abort | AskStats | AskLive | Ping | StopEngine
ToClient = EngineReady | Outputs | Stats | Live | Pong | EngineFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
