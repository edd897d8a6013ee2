"""What came of a load, whoever served it: an engine in this process (drive.py) or a server (client.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.steplog import StepRecord


@dataclass(slots=True)
class ServedRequest:
    """One request; times in seconds since the run began.

    It starts when it is due or, if a limit on concurrency holds it back, when it is sent: waiting for a
    busy engine counts, as it does for whoever asked.
    """

    prompt_len: int
    start_s: float
    token_times_s: list[float] = field(default_factory=list)  # a server's: of the pieces of its stream
    cached_tokens: int = 0
    error: str | None = None
    num_tokens: int | None = None  # of the answer, if a piece may hold several
    text: str | None = None

    @property
    def output_len(self) -> int:
        return len(self.token_times_s) if self.num_tokens is None else self.num_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.token_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.e2el_s - self.ttft_s) / max(self.output_len - 1, 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:])]


@dataclass(slots=True)
class Run:
    """What came of a load: its requests in order of arrival, and the steps that served them, if they are known."""

    served: list[ServedRequest]
    steps: list[StepRecord]
    begin_s: float  # on the clock of the step log
    client_processor_s: float | None = None  # what sending and receiving took, if a server did the work

    @property
    def completed(self) -> list[ServedRequest]:
        return [one for one in self.served if one.error is None]

    @property
    def duration_s(self) -> float:
        return max((one.token_times_s[-1] for one in self.completed), default=0.0)
