"""The number of draft tokens that each request verifies: none, a fixed number, or one that adapts to what pays.

A step that verifies drafts takes longer than one without, and yields more tokens. The draft at position j of a request
is accepted with about the probability a^j, where a is the measured acceptance of the request's drafts. So a step of
depth d yields the sum of 1 + a + ... + a^d over its requests, and takes the measured time T(d). The batch runs at the
depth with the highest ratio of the two; `batch_depth` computes it. On a GPU with few requests T hardly grows with d.
With many requests it grows so fast that the best depth is 0.

Within that depth a request drafts less if its own drafts are seldom accepted. The price of a draft token is the number
of tokens that the engine would generate in the time that the draft adds; `best_depth` drops the drafts with a^j below
it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.core.steplog import StepRecord
from quire.types import Request

_PRIOR = 0.7  # acceptance that is assumed before any request has verified drafts
_ROW_SMOOTHING = 0.08  # least weight of the newest row in the acceptance of a request
_PRIOR_DRAFTS = 4  # drafts that the assumed acceptance of a new request counts as much as
_ALL_SMOOTHING = 0.01  # and in that of all requests, with which new ones begin
_KEPT_STEPS = 8  # newest steps of each kind whose times are kept
_GAIN = 1.04  # by which drafts must be faster than none, because the figures are measured
_MARGIN = 1.15  # by which the draft of a request must exceed its price, for the same reason
_PROBE_STEPS = 64  # steps between two that run at another depth, so that its time stays measured
_MOST_PROBE_STEPS = 256  # the same after drafts have not paid for long
_FIRST_STEPS = 3  # at the largest depth and then without drafts, with a new number of rows


def best_depth(acceptance: float, price: float, most: int) -> int:
    """Return how many draft tokens pay: the largest j up to `most` with acceptance^j > price.

    Args:
        acceptance: probability that a draft is accepted if all drafts before it are.
        price: tokens that the engine would generate in the time that one draft token adds to a step.
        most: largest depth.
    """
    if price <= 0 or acceptance >= 1:
        return most if acceptance > price else 0
    if acceptance <= 0 or price >= 1:
        return 0
    return min(most, math.ceil(math.log(price) / math.log(acceptance)) - 1)


def rates(acceptances: np.ndarray, times_s: Sequence[float]) -> np.ndarray:
    """Return the expected tokens per second of a batch at each depth, float64 [depths].

    Args:
        acceptances: float64 [requests].
        times_s: duration of a step at depth 0, 1, ...
    """
    powers = acceptances[:, None] ** np.arange(len(times_s))  # [requests, depths]
    return powers.cumsum(1).sum(0) / np.asarray(times_s)


def batch_depth(acceptances: np.ndarray, times_s: Sequence[float]) -> int:
    """Return the depth at which a batch is fastest, or 0 if drafts gain less than `_GAIN`. Arguments as of `rates`."""
    expected = rates(acceptances, times_s)
    best = int(expected.argmax())
    return best if expected[best] > _GAIN * expected[0] else 0


class DraftDepth(Protocol):
    """Choice of the depth of each request. It owns `Request.drafts` and `Request.acceptance`."""

    def start(self, request: Request) -> None:
        """Set the depth of a new request."""
        ...

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        """Learn that a row of the request verified `drafted` draft tokens and accepted the first `accepted`."""
        ...

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        """Learn how long a step took; called when its results have arrived."""
        ...


class NoDrafts:
    """A `DraftDepth` of 0 for every request."""

    def start(self, request: Request) -> None:
        pass

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        pass


class FixedDepth:
    """A `DraftDepth` of `depth` for every request that can draft."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def start(self, request: Request) -> None:
        request.drafts = self.depth 

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        pass


class AdaptiveDepth:
    """A `DraftDepth` of at most `most` that follows the measured acceptance and the measured step times.

    Step times are kept by number of rows, rounded to a power of two, and average depth. With a new number of rows, the
    first steps run at the largest depth and the next ones without drafts. Later, one of `_PROBE_STEPS` steps runs without
    drafts, or with one per request if the others have none. While drafts do not pay, such steps become rarer.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: dict[int, _StepTimes] = {}
        self._depth = most  # of the batch
        self._size = 0  # of the batch, as a key of `_times`
        self._acceptance = _PRIOR  # of all requests

    def start(self, request: Request) -> None:
        # Hopeful, so that one kind of request does not end the drafts of another.
        request.acceptance = (self._acceptance + _PRIOR) / 2
        request.drafts = self._depth or 1

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        # Of the drafts that were reached, all but the last were accepted.
        share = accepted / min(drafted, accepted + 1)
        weight = max(_ROW_SMOOTHING, drafted / (request.timing.draft_tokens + _PRIOR_DRAFTS))
        request.acceptance += weight * (share - request.acceptance)
        self._acceptance += _ALL_SMOOTHING * (share - self._acceptance)

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        if record.prompt_tokens or not rows:
            return
        size = len(rows).bit_length()
        times = self._times.setdefault(size, _StepTimes(self.most))
        times.add(record.took_s, min(self.most, -(-record.drafts // len(rows))))
        if (depth := times.depth_to_measure()) is not None:
            self._depth = depth
            self._set_all(rows, depth)
        elif times.is_probe_due(bool(self._depth)):
            self._set_all(rows, 0 if self._depth else 1)
        elif self._depth or record.drafts or size != self._size:  # otherwise nothing has changed
            self._decide(rows, times.by_depth())
        self._size = size

    def _set_all(self, rows: Sequence[Request], depth: int) -> None:
        for request in rows:
            request.drafts = depth 

    def _decide(self, rows: Sequence[Request], times_s: list[float]) -> None:
        """Set the depth of the batch and of each request."""
        drafting = rows
        acceptances = np.array([request.acceptance for request in drafting])
        self._depth = depth = batch_depth(acceptances, times_s) if drafting else 0
        slope_s = max(0.0, times_s[-1] - times_s[1]) / max(1, self.most - 1) / len(rows)
        price = _MARGIN * slope_s * float(rates(acceptances, times_s)[depth]) if depth else 0.0
        for request in drafting:
            request.drafts = best_depth(request.acceptance, price, depth) if depth else 0


class _StepTimes:
    """Durations of the newest steps with about the same number of rows, by depth."""

    def __init__(self, most: int) -> None:
        self._newest_s = [deque[float](maxlen=_KEPT_STEPS) for _ in range(most + 1)]
        self._until_probe = self._interval = _PROBE_STEPS

    def add(self, took_s: float, depth: int) -> None:
        """Add a step."""
        self._newest_s[depth].append(took_s)

    def depth_to_measure(self) -> int | None:
        """Return the depth at which the next step must run to be measured, or None if the figures suffice."""
        most = len(self._newest_s) - 1
        return next((depth for depth in (most, 0) if len(self._newest_s[depth]) < _FIRST_STEPS), None)

    def is_probe_due(self, pays: bool) -> bool:
        """Return whether the next step should run at another depth than the best. `pays`: the best one has drafts."""
        if pays:
            self._interval = _PROBE_STEPS
        self._until_probe = min(self._until_probe, self._interval) - 1
        if self._until_probe > 0:
            return False
        if not pays:
            self._interval = min(2 * self._interval, _MOST_PROBE_STEPS)
        self._until_probe = self._interval
        return True

    def by_depth(self) -> list[float]:
        """Return the duration at each depth, interpolated between depths that have been measured.

        It is the lower quartile of the newest steps, because single steps take far longer: they compile kernels,
        capture graphs or wait for other programs.
        """
        known = [depth for depth, times_s in enumerate(self._newest_s) if len(times_s) >= _FIRST_STEPS]
        usual_s = [sorted(self._newest_s[depth])[len(self._newest_s[depth]) // 4] for depth in known]
        return np.interp(range(len(self._newest_s)), known, usual_s).tolist()
