"""The result of a load, served by an engine in this process (drive.py) or by a server (server/client.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.bench.energy import Energy
from quire.core.steplog import StepRecord
from quire.types import DraftCounts


@dataclass(slots=True)
class ServedRequest:
    """A served request; times are in seconds since the start of the run.

    A request starts at its arrival time or, if the limit of open requests holds it back, when it is sent. So latencies
    include the time that it waits for a busy engine.
    """

    prompt_len: int
    start_s: float
    # For a server: the times of the pieces of its stream.
    token_times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None
    num_tokens: int | None = None  # of the answer; None if every piece is one token
    text: str | None = None

    @property
    def output_len(self) -> int:
        """Return the length of the answer in tokens."""
        return len(self.token_times_s) if self.num_tokens is None else self.num_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """Return the end-to-end latency."""
        return self.token_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / max(self.output_len - 1, 1)

    @property
    def itls_s(self) -> list[float]:
        """Return the inter-token latencies, the gaps between tokens."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:])]


@dataclass(slots=True)
class Run:
    """The result of a load: its requests in order of arrival, and the steps of the engine if they are known."""

    served: list[ServedRequest]
    steps: list[StepRecord]
    begin_s: float  # on the clock of the step log
    client_processor_s: float | None = None  # CPU time of the client, for a server
    energy: Energy = field(default_factory=Energy)  # of the GPU of an engine in this process
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def completed(self) -> list[ServedRequest]:
        """Return the requests without an error."""
        return [one for one in self.served if one.error is None]

    @property
    def duration_s(self) -> float:
        """Return the time of the last token; 0 if every request failed."""
        return max((one.token_times_s[-1] for one in self.completed), default=0.0)
