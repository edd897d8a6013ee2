"""Affinity of prompts to replicas whose caches this process cannot see: it remembers which prompts went where.

The router of the server knows the blocks of each cache (serve/replicas/router.py). A router of Ray Serve sees only the
requests that it has sent, so it keeps the hashes of their beginnings, piece by piece, for each replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

_PIECE_BYTES = 256  # of the prompt's JSON; about four blocks of 16 tokens
_MOST_PIECES = 256  # of a prompt that are hashed
_REMEMBERED = 65_536  # pieces of each replica
_REQUEST_PIECES = 4  # pieces whose computation delays others as much as one more open request
_MOST_MISSING = 64  # pieces beyond which a detour is not worth more
_PROMPT_FIELDS = ("messages", "prompt", "input")


def prompt_pieces(body: bytes) -> list[bytes]:
    """Return a chain of hashes of the beginning of a request's prompt; equal beginnings give equal hashes.

    Args:
        body: the request's body; one that is no JSON object has no prompt.
    """
    try:
        request = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return []
    if not isinstance(request, dict):
        return []
    prompt = next((request[name] for name in _PROMPT_FIELDS if request.get(name)), None)
    if prompt is None:
        return []
    data = msgspec.json.encode([request.get("system"), request.get("tools"), prompt])[
        : _PIECE_BYTES * _MOST_PIECES
    ]
    pieces, name = [], b""
    for at in range(0, len(data) - _PIECE_BYTES + 1, _PIECE_BYTES):
        name = blake2b(name + data[at : at + _PIECE_BYTES], digest_size=8).digest()
        pieces.append(name)
    return pieces


class PrefixAffinity:
    """The pieces that each replica has been sent, the least recent ones forgotten."""

    def __init__(self) -> None:
        self._sent: dict[Any, OrderedDict[bytes, None]] = {}

    def keep(self, replicas: Collection[Any]) -> None:
        """Forget all replicas but these."""
        self._sent = {replica: pieces for replica, pieces in self._sent.items() if replica in replicas}

    def rank(self, pieces: list[bytes], loads: Mapping[Any, int]) -> list[Any]:
        """Return the replicas, best first.

        Args:
            pieces: of the prompt.
            loads: number of open requests by replica.
        """
        return sorted(loads, key=lambda replica: self._cost(pieces, replica, loads[replica]))

    def _cost(self, pieces: list[bytes], replica: Any, load: int) -> int:
        sent = self._sent.get(replica, OrderedDict())
        known = next((count for count, piece in enumerate(pieces) if piece not in sent), len(pieces))
        return min(len(pieces) - known, _MOST_MISSING) + load * _REQUEST_PIECES

    def note(self, pieces: list[bytes], replica: Any) -> None:
        """Remember that a prompt was sent to a replica."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for piece in pieces:
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > _REMEMBERED:
            sent.popitem(last=False)
