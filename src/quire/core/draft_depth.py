"""The number of draft tokens that each request verifies: none, a fixed number, or one that adapts to what pays.

A step that verifies drafts takes longer than one without, and yields more tokens. The draft at position j of a request
is accepted with about the probability a^j, where a is the measured acceptance of the request's drafts. So a step of
depth d yields the sum of 1 + a + ... + a^d over its requests, and takes the measured time T(d). The batch runs at the
depth with the highest ratio of the two; `batch_depth` computes it. On a GPU with few requests T hardly grows with d.
With many requests it grows so fast that the best depth is 0.

Within that depth a request drafts less if its own drafts are seldom accepted. The price of a draft token is the number
of tokens that the engine would generate in the time that the draft adds; `best_depth` drops the drafts with a^j below
it.

Estimates are wrong at times, and learning costs steps that yield less. `DraftAccount` bounds that loss: it adds up the
time that drafts have gained or lost against steps without drafts, and allows drafts only while it is not overdrawn.
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
_ALL_SMOOTHING = 0.02  # weight of a row in the acceptance of all requests, with which new ones begin
_KEPT_STEPS = 8  # newest steps of each kind whose times are kept
_GAIN = 1.04  # by which drafts must be faster than none, because the figures are measured
_OPTIMISM = 0.1  # added to the acceptance of a request before its drafts are shortened, for the same reason
_PLAIN_STEPS = 3  # without drafts, before the first drafts with a new number of rows
_DRAFT_STEPS = 2  # at a new depth, before its time counts as measured: the first one may capture a graph
_PROBE_STEPS = 64  # steps without drafts until a few rows draft again
_MOST_PROBE_STEPS = 1024  # the same after drafts have not paid for long
_REFRESH_STEPS = 256  # steps with drafts until one runs without, so that its time stays measured
_CHECK_STEPS = 4  # the same for the first time, if the times are those of more rows
_DECISION_STEPS = 8  # from one decision to the next while a batch does not draft
_PROBE_SHARE = 4  # one of so many rows drafts in a probe
_FEW_ROWS = 2  # with which the first drafts are several
_ALLOWANCE = 0.01  # share of the time that drafts may cost
_LEAST_S = 1e-6  # duration of a step that seems to have taken no time, because the host was late
_START_STEPS = 1.0  # steps without drafts that drafts may cost with each new number of rows
_MOST_STEPS = 3.0  # steps without drafts that earlier gains pay for at most, unless a probe costs more
_TRIAL_STEPS = (
    4  # until the first step with drafts counts as lost, because its request has ended or they were dropped
)


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


class DraftAccount:
    """The time that drafts may still lose: what they gained, plus a hundredth of all time, minus what they lost.

    Gains and losses are against steps without drafts. Earlier gains count for a few steps only, so drafts that stop
    paying are soon given up.
    """

    def __init__(self) -> None:
        self._balance_s = 0.0

    @property
    def overdrawn(self) -> bool:
        """Return whether drafts must wait."""
        return self._balance_s <= 0

    def open(self, plain_s: float) -> None:
        """Allow a loss because a new number of rows has to be learned. `plain_s`: its time without drafts."""
        self._balance_s = max(self._balance_s, 0.0) + _START_STEPS * plain_s

    def settle(self, took_s: float, plain_s: float, yielded: float, price_s: float = 0.0) -> None:
        """Enter a step, or several together.

        Args:
            took_s: their duration.
            plain_s: duration of a step without drafts.
            yielded: tokens per row.
            price_s: what the next probe may lose; so much may always be saved.
        """
        self._balance_s += yielded * plain_s - took_s + _ALLOWANCE * took_s
        self._balance_s = min(self._balance_s, max(_MOST_STEPS * plain_s, 1.01 * price_s))

    def affords(self, loss_s: float) -> bool:
        """Return whether a loss of so many seconds leaves the account balanced."""
        return self._balance_s >= loss_s


class AdaptiveDepth:
    """A `DraftDepth` of at most `most` that follows the measured acceptance and the measured step times.

    Step times are kept by number of rows, rounded to a power of two, and average depth. With a new number of rows, the
    first steps run without drafts. Then the depth grows from 1 as long as a greater one may be faster. While drafts do
    not pay, a few rows draft in one of `_PROBE_STEPS` steps, and ever more seldom.

    If drafts pay when requests end, the smaller batch goes on at the same depth with the times of the larger one until
    it has its own. Drafts cost it less, and a batch that drains is not of the same size for long enough to learn.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: dict[int, _StepTimes] = {}
        self._depth = 0  # of the batch
        self._size = 0  # of the last step without prompts: bits of its number of rows
        self._acceptance = _PRIOR  # of all requests
        self._account = DraftAccount()
        self._turn = 0  # which rows draft in the next probe
        self._has_drafted = False
        self._since = 0  # steps since the last decision
        self._rests = False  # whether that decided for no drafts, which holds for some steps
        self._trial = 0  # steps until the first step with drafts, which has been asked for, counts as lost

    def start(self, request: Request) -> None:
        # Hopeful, so that one kind of request does not end the drafts of another.
        request.acceptance = (self._acceptance + _PRIOR) / 2
        request.drafts = self._depth

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        # Of the drafts that were reached, all but the last were accepted.
        share = accepted / min(drafted, accepted + 1)
        weight = max(_ROW_SMOOTHING, drafted / (request.timing.draft_tokens + _PRIOR_DRAFTS))
        request.acceptance += weight * (share - request.acceptance)
        self._acceptance += _ALL_SMOOTHING * (share - self._acceptance)

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        if record.prompt_tokens or not rows:
            return
        size, before = len(rows).bit_length(), self._size
        times = self._times_of(size, len(rows))
        depth = min(self.most, -(-record.drafts // len(rows)))
        self._has_drafted |= record.drafts > 0
        self._trial = max(0, self._trial - 1)
        is_known = times.add(record.took_s, depth)
        self._since += 1
        if self._rests and self._since < _DECISION_STEPS and size == before and not record.drafts:
            return
        steps, self._since, self._rests = self._since, 0, False
        if not is_known:
            return self._draft(rows, 0)
        if times.is_new:
            times.is_new = False
            self._account.open(times.plain_s)
        if record.drafts:
            yielded = record.generated / len(rows)
            took_s = min(record.took_s, times.longest(depth))
            self._account.settle(took_s, times.plain_s, yielded, times.probe_s(self._acceptance))
        else:
            plain_s = times.plain_s
            self._account.settle(steps * plain_s, plain_s, steps, times.probe_s(self._acceptance))
        if self._account.overdrawn:
            return self._draft(rows, 0)
        self._decide(rows, times, steps)

    def _times_of(self, size: int, rows: int) -> _StepTimes:
        """Return the times of steps of `rows` rows, whose number has `size` bits."""
        if size not in self._times:
            self._times[size] = times = _StepTimes(self.most, rows)
            if size < self._size and self._depth:
                times.assume(self._times[self._size], self._depth)
        self._size = size
        return self._times[size]

    def _draft(self, rows: Sequence[Request], depth: int) -> None:
        self._depth = depth
        for request in rows:
            request.drafts = depth

    def _decide(self, rows: Sequence[Request], times: _StepTimes, steps: int) -> None:
        """Set the depth of the batch and of each request, `steps` steps after the last decision."""
        times_s = times.by_depth()
        own = np.array([request.acceptance for request in rows])
        acceptances = (own + self._acceptance) / 2  # a request has verified few drafts, all together many
        depth = batch_depth(acceptances, times_s)
        if depth and not self._has_drafted and len(rows) <= _FEW_ROWS:
            # One step shows what several drafts cost here, but with overlap two more would be on their way by then.
            if self._trial:
                return self._draft(rows, 0)
            self._trial = _TRIAL_STEPS
        if times.is_turn_due(depth > 0, self._account.affords(times.probe_s(self._acceptance)), steps):
            if not depth:
                return self._probe(rows)
            depth = 0
        self._draft(rows, depth)
        self._rests = not depth
        if depth > 1:
            slope_s = max(0.0, times_s[depth] - times_s[1]) / (depth - 1) / len(rows)
            price = slope_s * float(rates(acceptances, times_s)[depth])
            for request in rows:
                request.drafts = best_depth(request.acceptance + _OPTIMISM, price, depth)

    def _probe(self, rows: Sequence[Request]) -> None:
        """Let a few rows draft one token each, to see whether drafts would be accepted now."""
        self._draft(rows, 0)
        every = _PROBE_SHARE if len(rows) >= 2 * _PROBE_SHARE else 1
        self._turn += 1
        for request in rows[self._turn % every :: every]:
            request.drafts = 1


class _StepTimes:
    """Durations of the newest steps with about the same number of rows, by depth."""

    def __init__(self, most: int, rows: int) -> None:
        self._newest_s = [deque[float](maxlen=_KEPT_STEPS) for _ in range(most + 1)]
        # By depth, the steps until its time counts as known.
        self._lacking = [_PLAIN_STEPS, *[_DRAFT_STEPS] * most]
        # Depths to measure; those between are interpolated. Kernels for two tokens can be slower than those for four,
        # so the first drafts of few rows are several: most of their time is that of having any.
        middle = -(-most // 2)
        self._levels = sorted({middle if rows <= _FEW_ROWS else 1, middle, most})
        self._until_turn = self._interval = _PROBE_STEPS
        self._pays = False
        self.is_new = True

    def add(self, took_s: float, depth: int) -> bool:
        """Add a step. Return whether the time without drafts is known."""
        self._newest_s[depth].append(max(took_s, _LEAST_S))
        self._lacking[depth] -= 1
        return self._lacking[0] <= 0

    def assume(self, larger: _StepTimes, depth: int) -> None:
        """Begin with the times that more rows take without drafts and at `depth`, as if they were measured."""
        if larger.knows(0) and larger.knows(depth):
            for known in (0, depth):
                self._newest_s[known].append(larger._usual(known))
                self._lacking[known] = 0
            self._pays, self._interval, self._until_turn = True, _REFRESH_STEPS, _CHECK_STEPS

    def knows(self, depth: int) -> bool:
        """Return whether the duration at this depth is known."""
        return self._lacking[depth] <= 0

    @property
    def plain_s(self) -> float:
        """Duration without drafts."""
        return self._usual(0)

    def longest(self, depth: int) -> float:
        """Return the longest duration that a step is charged. Once per depth a step captures a graph."""
        if not self.knows(depth):
            return _MOST_STEPS * self.plain_s
        return 2 * self._usual(depth)

    def _usual(self, depth: int) -> float:
        """Return the lower quartile, because single steps take far longer: they capture graphs or wait."""
        newest = sorted(self._newest_s[depth])
        return newest[len(newest) // 4]

    def probe_s(self, acceptance: float) -> float:
        """Return the time that a probe is expected to lose, as far as it is known."""
        drafted = next(
            (self._usual(depth) for depth in range(1, len(self._newest_s)) if self.knows(depth)), 0.0
        )
        return max(0.0, drafted - (1 + acceptance) * self.plain_s)

    def is_turn_due(self, pays: bool, affords: bool, steps: int) -> bool:
        """Return whether the next step should do the opposite of the usual: draft if drafts do not pay, or else not.

        `steps` have run since the last answer.

        Drafts that do not pay wait until the account affords them.
        """
        if pays != self._pays:
            self._pays, self._interval = pays, _REFRESH_STEPS if pays else _PROBE_STEPS
            self._until_turn = self._interval
        self._until_turn -= steps
        if self._until_turn > 0 or not (pays or affords):
            return False
        if not pays:
            self._interval = min(2 * self._interval, _MOST_PROBE_STEPS)
        self._until_turn = self._interval
        return True

    def by_depth(self) -> list[float]:
        """Return the duration at each depth, hopeful at the next depth to measure and infinite behind it."""
        known = [depth for depth in range(len(self._newest_s)) if self.knows(depth)]
        usual_s = [self._usual(depth) for depth in known]
        last = known[-1]
        reach = next((level for level in self._levels if level > last), last)
        if reach > last:
            known.append(reach)
            usual_s.append(usual_s[-1] + self._hopeful_slope(known[:-1], usual_s) * (reach - last))
        found: list[float] = np.interp(range(reach + 1), known, usual_s).tolist()
        return found + [math.inf] * (len(self._newest_s) - 1 - reach)

    @staticmethod
    def _hopeful_slope(known: list[int], usual_s: list[float]) -> float:
        """Return the seconds that a further draft adds, at least: the first one may add more than those behind it."""
        if len(known) < 2:
            return 0.0
        slope_s = (usual_s[-1] - usual_s[-2]) / (known[-1] - known[-2])
        return max(0.0, slope_s) * (0.5 if len(known) == 2 else 1.0)
