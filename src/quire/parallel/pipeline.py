"""The links between the stages of a pipeline: hidden states go forward, sampled tokens come back.

All stages run the same plans in the same order. In each step a stage receives the hidden states of the stage in front,
runs its layers, and sends its own. The last stage samples, and publishes the tokens to all others. These append them to
their slot columns before the first step that can read them, which is the number of stages later (`core/scheduler.py`).

Tokens travel apart from hidden states, and nobody waits until they have been received: on a GPU they have their own
communicator and stream. Otherwise two stages could each wait for the other to receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from quire.parallel.stage import WHOLE, Stage

_STATES, _TOKENS = range(2)  # tags


class Link(Protocol):
    """The connection of one stage to the others."""

    @property
    def stage(self) -> Stage:
        """Return the place of this rank in the pipeline."""
        ...

    def receive(self, tokens: int) -> None:
        """Fill `stage.incoming` with the states of `tokens` tokens from the stage in front, if there is one."""
        ...

    def send(self, tokens: int) -> None:
        """Send the states of `tokens` tokens in `stage.outgoing` to the next stage, if there is one."""
        ...

    def publish(self, tokens: Callable[[], torch.Tensor]) -> None:
        """Send the sampled tokens of a step to all other stages. Only the last stage calls this.

        Args:
            tokens: returns them, int32 [rows, width], on the device; called if there are other stages.
        """
        ...

    def collect(self, rows: int, width: int) -> torch.Tensor:
        """Return the oldest published tokens not yet collected, int32 [rows, width]. Not called in the last stage."""
        ...

    @property
    def is_muted(self) -> bool:
        """Return whether calls exchange nothing now."""
        ...

    def muted(self) -> AbstractContextManager[object]:
        """Return a context in which calls exchange nothing, for steps that only compile kernels."""
        ...


class NoLink:
    """The link of a pipeline of one stage."""

    stage: Stage = WHOLE
    is_muted = False

    def receive(self, tokens: int) -> None:
        pass

    def send(self, tokens: int) -> None:
        pass

    def publish(self, tokens: Callable[[], torch.Tensor]) -> None:
        pass

    def collect(self, rows: int, width: int) -> torch.Tensor:
        raise AssertionError("a pipeline of one stage samples its own tokens")

    def muted(self) -> AbstractContextManager[object]:
        return nullcontext()


NO_LINK = NoLink()


class GroupLink:
    """Link over two process groups of torch, whose ranks are the stages: one for states, one for tokens.

    Args:
        stage: the place of this rank, with its buffers.
        states: the group for hidden states.
        tokens: the group for sampled tokens.
        depth: steps that may be in flight; so many messages may wait to be received.
    """

    def __init__(
        self, stage: Stage, states: dist.ProcessGroup, tokens: dist.ProcessGroup, depth: int
    ) -> None:
        self.stage, self._states, self._tokens, self._depth = stage, states, tokens, depth
        self._device = stage.incoming.device
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        # What has been sent and perhaps not been received, with the memory that it is sent from.
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        self.is_muted = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        self.is_muted = True
        try:
            yield
        finally:
            self.is_muted = False

    def receive(self, tokens: int) -> None:
        if not self.stage.is_first and not self.is_muted:
            _wait(self._states.recv([self.stage.incoming[:tokens]], self.stage.index - 1, _STATES))

    def send(self, tokens: int) -> None:
        if self.stage.is_last or self.is_muted:
            return
        states = self.stage.outgoing[:tokens]
        if self._side:  # the next step overwrites the buffer behind this in stream order
            _wait(self._states.send([states], self.stage.index + 1, _STATES))
        else:
            self._post(self._states, states.clone(), self.stage.index + 1, _STATES)

    def publish(self, tokens: Callable[[], torch.Tensor]) -> None:
        if self.is_muted:
            return
        sampled = tokens().clone(memory_format=torch.contiguous_format)
        aside: AbstractContextManager[object] = nullcontext()
        if self._side:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            sampled.record_stream(self._side)
            aside = torch.cuda.stream(self._side)
        with aside:
            for index in range(self.stage.index):
                self._post(self._tokens, sampled, index, _TOKENS)

    def collect(self, rows: int, width: int) -> torch.Tensor:
        tokens = torch.empty(rows, width, dtype=torch.int32, device=self._device)
        _wait(self._tokens.recv([tokens], self.stage.count - 1, _TOKENS))
        return tokens

    def _post(self, group: dist.ProcessGroup, x: torch.Tensor, to: int, tag: int) -> None:
        """Send `x` without waiting for its receiver."""
        if len(self._sent) >= 2 * self._depth * self.stage.count:
            work, _ = self._sent.popleft()
            if self._side is None:  # it has been received long ago: steps are retired in order
                _wait(work)
        self._sent.append((group.send([x], to, tag), x))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
