"""The messages between the host and its ranks, as msgpack.

The host sends `Command` and, in every step, a plan and the masks of its sampling. A rank answers commands only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.types import BlockKey, EngineRequest, SlotAdmission, StepPlan, TokenMasks, TransferOrder


class StartRank(msgspec.Struct, tag=True):
    """Host to rank, first and through its channel: what to build."""

    config: EngineConfig
    path: str  # folder or file of the model
    rank: int


class PhaseEnded(msgspec.Struct, tag=True):
    """Rank to host: the result of a phase of the start-up. The first one says that the rank is ready to connect.

    `spans` are begin and end of each phase so far (timeline.py).
    """

    result: int
    spans: dict[str, tuple[float, float]] = {}


class CopiesEnded(msgspec.Struct, tag=True):
    """Rank to host: the end of a transfer order on this rank."""

    ticket: int
    failed: list[int]


class RankError(msgspec.Struct, tag=True):
    """Rank to host, last: the reason why the rank ends. `kind` is the name of the error class."""

    kind: str
    cause: str


FromRank = PhaseEnded | CopiesEnded | RankError

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(StartRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode

# Kinds of messages in the ring: the first byte of each.
PHASE, FORWARD, SAMPLE, WARM_UP, STOP, TRANSFER = range(6)

_decode_transfer = msgspec.msgpack.Decoder(tuple[list[TransferOrder], list[BlockKey]]).decode
_ARRAY, _NUMPY = 1, 2  # codes of msgpack's extension types
_DTYPES = ("int32", "int64", "bool", "float32", "uint8", "uint32")


def encode_phase(name: str, argument: int) -> bytes:
    """Encode the order to run a phase of the start-up."""
    return bytes((PHASE,)) + encode((name, argument))


def encode_forward(plan: StepPlan) -> bytes:
    """Encode the plan of a step. Prompts of admitted requests are left out: their tokens are in the admission."""
    admissions = [replace(a, request=replace(a.request, prompt=[])) for a in plan.admissions]
    return bytes((FORWARD,)) + _encode_plan(replace(plan, admissions=admissions) if admissions else plan)


def encode_sample(step: int, masks: TokenMasks | None) -> bytes:
    """Encode the order to sample a step."""
    return bytes((SAMPLE,)) + _encode_plan((step, masks))


def encode_transfer(orders: Sequence[TransferOrder], drops: Sequence[BlockKey]) -> bytes:
    """Encode the order to copy blocks and to delete files."""
    return bytes((TRANSFER,)) + encode((orders, drops))


def decode_transfer(body: memoryview) -> tuple[list[TransferOrder], list[BlockKey]]:
    """Decode what `encode_transfer` has encoded, without its first byte."""
    return _decode_transfer(body)


def decode_phase(body: memoryview) -> tuple[str, int]:
    """Decode what `encode_phase` has encoded, without its first byte."""
    name, argument = msgspec.msgpack.decode(body)
    return name, argument


def decode_forward(body: memoryview) -> StepPlan:
    """Decode what `encode_forward` has encoded, without its first byte."""
    fields: dict[str, Any] = _decode_plan(body)
    fields["admissions"] = [_admission(admission) for admission in fields["admissions"]]
    return StepPlan(**fields)


def decode_sample(body: memoryview) -> tuple[int, TokenMasks | None]:
    """Decode what `encode_sample` has encoded, without its first byte."""
    step, masks = _decode_plan(body)
    return step, None if masks is None else TokenMasks(**masks)


def _admission(fields: dict[str, Any]) -> SlotAdmission:
    return SlotAdmission(**{**fields, "request": msgspec.convert(fields["request"], EngineRequest)})


def _to_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        code = _DTYPES.index(value.dtype.name)
        shape = np.array((code, value.ndim, *value.shape), np.int32)
        return msgspec.msgpack.Ext(_NUMPY, shape.tobytes() + value.tobytes())
    if isinstance(value, array):
        return msgspec.msgpack.Ext(_ARRAY, value.typecode.encode() + value.tobytes())
    raise TypeError(f"a plan cannot hold a {type(value).__name__}")


def _from_extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        return array(chr(data[0]), bytes(data[1:]))
    dtype, dims = np.frombuffer(data, np.int32, 2).tolist()
    shape = np.frombuffer(data, np.int32, dims, 8)
    return np.frombuffer(data, _DTYPES[dtype], offset=8 + 4 * dims).reshape(shape).copy()


_encode_plan = msgspec.msgpack.Encoder(enc_hook=_to_extension).encode
_decode_plan = msgspec.msgpack.Decoder(ext_hook=_from_extension).decode
