"""What travels between a client and an engine process: msgpack, token ids only, one message per step."""

from __future__ import annotations

import msgspec

from quire.config import EngineConfig
from quire.types import (
    EngineInfo,
    EngineLive,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Figures,
)


class StartEngine(msgspec.Struct, tag=True):
    """Client to engine, first: the settings to build from.

    `dry_run_step_s` given: no model is loaded, and each step takes so long (dry_run.py).
    """

    config: EngineConfig
    dry_run_step_s: float | None = None


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Client to engine: answer with Stats, between two steps. `owner`: as of AskLive."""

    owner: str | None = None


class AskLive(msgspec.Struct, tag=True):
    """Client to engine: answer with Live, between two steps. `since`: the newest step that is known already.
    `owner`: only requests of this client are told apart; None: all."""

    since: int
    owner: str | None = None


class Ping(msgspec.Struct, tag=True):
    """Client to engine: answer with Pong, between two steps."""


class StopEngine(msgspec.Struct, tag=True):
    """Client to engine, last."""


class EngineReady(msgspec.Struct, tag=True):
    """Engine to client: built, and this is what came of it."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True):
    """Engine to client: everything one step brought, and what the engine is like after it."""

    outputs: list[EngineOutput]
    load: EngineLoad
    figures: Figures


class Stats(msgspec.Struct, tag=True):
    """Engine to client: its figures now."""

    stats: EngineStats


class Live(msgspec.Struct, tag=True):
    """Engine to client: what it does now."""

    live: EngineLive


class Pong(msgspec.Struct, tag=True):
    """Engine to client: a sign of life."""


class EngineFailed(msgspec.Struct, tag=True):
    """Engine to client: the cause of its end; `kind` is the name of the error class."""

    kind: str
    cause: str


ToEngine = StartEngine | Add | Abort | AskStats | AskLive | Ping | StopEngine
ToClient = EngineReady | Outputs | Stats | Live | Pong | EngineFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
