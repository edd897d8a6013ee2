"""A fake engine process for tests of what stands in front of it: it notes what is sent, and tests write its answers."""

from __future__ import annotations

import asyncio
import os

import msgspec

from quire.frontend.client import ipc as msg
from quire.types import EngineDead, EngineInfo, EngineLoad, EngineOutput, Figures
from quire.types.block_names import NameChanges


def description(slots: int = 4, blocks: int = 64) -> EngineInfo:
    """Return the description of an engine with few slots."""
    return EngineInfo(
        model="demo", family="", vocab_size=2048, max_model_len=2048, eos_ids=[0], device="none", dtype="none",
        attention="none", max_num_seqs=slots, max_num_batched_tokens=512, num_blocks=blocks, block_size=16, block_bytes=1,
        weight_bytes=0, num_parameters=0, prefix_caching=True, phases_s={"dry_run": 0.0},
    )  # fmt: skip


class FakeProcess:
    """A process that answers on demand; an exception in `answers` ends it."""

    pid = os.getpid()

    def __init__(self, slots: int = 4) -> None:
        self.answers: asyncio.Queue[msg.ToClient | Exception] = asyncio.Queue()
        self.asked: list[msg.ToEngine] = []
        self.closed = False
        self._slots = slots
        self._received = 0

    async def ready(self) -> EngineInfo:
        return description(self._slots)

    def cpu_s(self) -> float:
        return 0.0

    def send(self, message: msg.ToEngine) -> None:
        self.asked.append(message)

    def send_frames(self, frames: bytes) -> None:
        while frames:
            size = 4 + int.from_bytes(frames[:4], "little")
            self.asked.append(msg.decode_to_engine(frames[4:size]))
            frames = frames[size:]

    async def receive(self) -> msg.ToClient:
        message = await self.answers.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def close(self, kill: bool = False) -> None:
        self.closed = True

    def end(self) -> None:
        self.die("it was killed")

    @property
    def added(self) -> list[str]:
        """Return the ids of the requests that arrived."""
        return [one.request.id for one in self.asked if isinstance(one, msg.Add)]

    @property
    def aborted(self) -> list[str]:
        return [name for one in self.asked if isinstance(one, msg.Abort) for name in one.ids]

    def say(self, *outputs: EngineOutput, names: NameChanges | None = None, **load: int) -> None:
        """Send the outputs of a step."""
        found = EngineLoad(len(self.added), **load)
        message = msg.Outputs(list(outputs), found, Figures(time_s=1.0), names or NameChanges())
        # The way over the wire, so that types are those of a real message.
        self.answers.put_nowait(msg.decode_to_client(msgspec.msgpack.encode(message)))

    def finish(self, *ids: str) -> None:
        """End requests with one token each."""
        self.say(*(EngineOutput(name, [7], "length") for name in ids))

    def die(self, cause: str = "its process ended with exit code -9") -> None:
        self.answers.put_nowait(EngineDead(cause))
