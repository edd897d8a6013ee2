"""The number of draft tokens that each request verifies: none, a fixed number, or one that adapts to what pays.

A step of *n* requests that verifies drafts takes longer than one without, and yields more tokens. The price of a draft
token is the number of tokens that the engine would generate in the time that the draft adds to a step:

    price = (tokens generated per second) * (seconds added per draft token)

The draft at position j of a request is accepted with about the probability a^j, where a is the measured acceptance of
the request's drafts. It pays while a^j > price. On a GPU with few requests a step is bound by reading weights and the
price is near 0; with many requests it exceeds 1, and nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from quire.core.steplog import StepRecord
from quire.types import Request

_PRIOR = 0.7  # acceptance that is assumed before a request has verified drafts
_REQUEST_SMOOTHING = 0.08  # weight of the newest row in the acceptance of a request
_MARGIN = 1.15  # by which a draft must exceed the price, because the acceptance is measured on few rows
_STEP_SMOOTHING = 0.1  # weight of the newest step in step times
_FIRST_PRICE = 0.02  # per request in the batch, until steps with and without drafts have been timed
_FIRST_PROBE_STEPS = 8  # the same until both have been timed
_PROBE_STEPS = 64  # steps between two that run the other way, so that both times stay measured


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


def draft_price(plain_s: float, drafted_s: float, drafts: float, plain_tokens: float, tokens: float) -> float:
    """Return the price of a draft token in generated tokens.

    Args:
        plain_s: duration of a step without drafts.
        drafted_s: duration of a step with drafts, over the same requests.
        drafts: draft tokens of such a step.
        plain_tokens: tokens that a step without drafts generates, one per request.
        tokens: tokens that a step with drafts generates.
    """
    rate = max(plain_tokens / plain_s, tokens / drafted_s)
    return rate * max(0.0, drafted_s - plain_s) / drafts


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
        request.drafts = self.depth if can_draft(request) else 0

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        pass

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        pass


def can_draft(request: Request) -> bool:
    """Return whether draft tokens of a request can be verified: not under a grammar, whose masks need the host."""
    return request.source.grammar is None


class AdaptiveDepth:
    """A `DraftDepth` of at most `most` that follows the measured acceptance and the measured step times.

    Step times are kept by number of rows, rounded to a power of two. Every `_PROBE_STEPS` steps one step runs without
    drafts if the others have them, and with a single draft per request if they have none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: dict[int, _StepTimes] = {}

    def start(self, request: Request) -> None:
        request.acceptance = _PRIOR
        request.drafts = self.most if can_draft(request) else 0

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        # Of the drafts that were reached, all but the last were accepted.
        reached = min(drafted, accepted + 1)
        request.acceptance += _REQUEST_SMOOTHING * (accepted / reached - request.acceptance)

    def end_step(self, record: StepRecord, rows: Sequence[Request]) -> None:
        if record.prompt_tokens or not rows:
            return
        times = self._times.setdefault(len(rows).bit_length(), _StepTimes())
        times.add(record.took_s, len(rows), record.drafts, record.generated)
        price = _MARGIN * times.price(len(rows))
        drafting = [request for request in rows if can_draft(request)]
        depths = [best_depth(request.acceptance, price, self.most) for request in drafting]
        if times.is_probe_due():
            depths = [0 if any(depths) else 1] * len(depths)
        for request, depth in zip(drafting, depths):
            request.drafts = depth


class _StepTimes:
    """Smoothed figures of steps with about the same number of rows, with and without drafts."""

    def __init__(self) -> None:
        self._plain_s = self._plain_rows = 0.0
        self._drafted_s = self._drafts = self._tokens = 0.0
        self._steps = 0

    def add(self, took_s: float, rows: int, drafts: int, tokens: int) -> None:
        """Add a step. The first step of a kind may compile kernels, so a much shorter one replaces the figures."""
        self._steps += 1
        if drafts:
            by = _weight(took_s, self._drafted_s)
            self._drafted_s += by * (took_s - self._drafted_s)
            self._drafts += by * (drafts - self._drafts)
            self._tokens += by * (tokens - self._tokens)
        else:
            by = _weight(took_s, self._plain_s)
            self._plain_s += by * (took_s - self._plain_s)
            self._plain_rows += by * (rows - self._plain_rows)

    def is_probe_due(self) -> bool:
        """Return whether the next step should run the other way, with drafts or without."""
        is_timed = self._plain_s and self._drafted_s
        return self._steps % (_PROBE_STEPS if is_timed else _FIRST_PROBE_STEPS) == 0

    def price(self, rows: int) -> float:
        """Return the price of a draft token, or a guess until both kinds of steps have been timed."""
        if not (self._plain_s and self._drafted_s):
            return _FIRST_PRICE * rows
        return draft_price(self._plain_s, self._drafted_s, self._drafts, self._plain_rows, self._tokens)


def _weight(took_s: float, mean_s: float) -> float:
    return 1.0 if not mean_s or took_s < mean_s / 2 else _STEP_SMOOTHING
