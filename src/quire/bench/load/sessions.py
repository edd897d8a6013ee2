"""Sessions: conversations whose next prompt holds everything said so far. Fixed by a seed.

`agent_session` is a program that calls tools: a long system prompt that all sessions share, tool results that come back
quickly and make the context grow. `chat_serving` is many people: short messages, and time to read and think.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Preset = Literal["short", "mid", "long"]
_SEED = 42


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: after a pause, new tokens are appended to the context, and an answer follows."""

    pause_s: float  # since the end of the answer before
    new_tokens: list[int]
    answer_len: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. Its first turn begins at `start_s`."""

    start_s: float
    system: list[int]
    turns: Sequence[Turn]

    @property
    def length(self) -> int:
        """Return the tokens of the context at its end."""
        return len(self.system) + sum(len(turn.new_tokens) + turn.answer_len for turn in self.turns)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The ranges that a kind of session is drawn from, in tokens and seconds."""

    sessions: int
    turns: tuple[int, int]
    system: int
    new_tokens: tuple[int, int]
    answer: tuple[int, int]
    pause_s: tuple[float, float]
    within_s: float  # sessions begin within this time


SHAPES: dict[str, dict[Preset, _Shape]] = {
    "agent_session": {
        "short": _Shape(4, (4, 4), 512, (64, 256), (32, 96), (0.05, 0.3), 0.5),
        "mid": _Shape(8, (8, 8), 1024, (128, 512), (48, 160), (0.05, 0.5), 2.0),
        "long": _Shape(16, (16, 16), 2048, (256, 1024), (64, 256), (0.05, 1.0), 4.0),
    },
    "chat_serving": {
        "short": _Shape(8, (2, 3), 64, (16, 64), (32, 128), (0.2, 0.6), 1.0),
        "mid": _Shape(32, (3, 5), 256, (20, 120), (80, 250), (0.5, 2.0), 4.0),
        "long": _Shape(128, (4, 8), 512, (20, 200), (100, 400), (1.0, 5.0), 10.0),
    },
}


def sessions(kind: str, preset: Preset, vocab: int, scale: float = 1.0, shift: int = 0) -> list[Session]:
    """Draw the sessions of a kind and preset.

    Args:
        kind: agent_session or chat_serving.
        preset: how many sessions, how many turns, and how long.
        vocab: number of token ids to draw from.
        scale: factor for all lengths.
        shift: number to add to every token id, so that the prefix cache finds nothing of other shifts.
    """
    shape, r = SHAPES[kind][preset], random.Random(f"{_SEED} {kind} {preset}")

    def ids(count: float) -> list[int]:
        return [(i + shift) % vocab for i in r.choices(range(vocab), k=max(round(count * scale), 1))]

    system = ids(shape.system)
    return [
        Session(
            r.uniform(0, shape.within_s),
            system,
            [
                Turn(
                    r.uniform(*shape.pause_s) if turn else 0.0,
                    ids(r.randint(*shape.new_tokens)),
                    max(round(r.randint(*shape.answer) * scale), 1),
                )
                for turn in range(r.randint(*shape.turns))
            ],
        )
        for _ in range(shape.sessions)
    ]
