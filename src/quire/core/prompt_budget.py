"""The number of prompt tokens in a step that also decodes: a fixed one, or as many as latency targets allow.

Every decoding request waits for the whole step, so its inter-token latency is the time of the step. With a target the
chunk is the largest with which the step is predicted to end in time; a smaller one would only delay prompts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.core.step_time import StepLoad, StepTimeModel, load_of, size_class
from quire.core.steplog import StepRecord
from quire.types import Request, RequestTargets, Totals

_FIRST_TOKENS = 64  # of a chunk before the time of one is known
_LEAST_TOKENS = 32  # of a chunk, even if the target cannot be met: prompts must go on
_CAUTION = 0.7  # share of the limit that a chunk fills while only long prompts show how fast prompts are
_GROWTH = 2.0  # a chunk exceeds the largest that was observed by this factor at most: the fit ends there
_FEW_FINISHED = 16  # requests of which the length of answers is not typical
_COUNTED_TOKENS = 64  # of an answer to come, beside tokens that have come
_FAR = 2.5  # times as many rows as decode are predicted from those, at most
_UNKNOWN_S = 1e-9  # stands for the time of a step that is not known yet: prompts then run in short chunks
_MOST_CUT = 1 / 3  # of a chunk that is left out to fill a step of a common size
_OWN_SHARE = 2.0  # a target of one request leaves prompts at least half of the time
_USUAL_STEPS = 512  # newest steps of which three quarters take at least the usual time
_RATE_STEPS = 8  # steps between two estimates of the rate
_CHUNK_SMOOTHING = 0.1  # of the chunk, per step with prompts
_SMOOTHING = 0.05  # of the entries in front of a prompt token, per step with prompts


class PromptBudget(Protocol):
    """The choice of the prompt tokens of steps that also decode."""

    rate: float  # prompt tokens per second beside the rows that decode now; 0 while it is not known

    def tokens(
        self,
        decoding: np.ndarray,
        requests: Sequence[Request],
        first: Request | None,
        coming: int,
        now_s: float,
    ) -> int:
        """Return the number of prompt tokens that a step may have.

        Args:
            decoding: int32 [rows], lengths of the rows that decode in it.
            requests: the requests of these rows.
            first: the request whose prompt is next; None if there is none.
            coming: number of requests whose prompts wait, and for which there is room in the batch.
            now_s: on the engine's clock.
        """
        ...

    def admits(self, running: int) -> bool:
        """Return whether another request may join `running` ones."""
        ...

    def predict(self, record: StepRecord) -> float:
        """Return the predicted seconds of a step; 0 if nothing is predicted."""
        ...

    def end_step(self, record: StepRecord) -> None:
        """Learn how long a step took; called when its results have arrived."""
        ...


class FixedBudget:
    """A `PromptBudget` of `limit` tokens in every step."""

    rate = 0.0

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def tokens(
        self,
        decoding: np.ndarray,
        requests: Sequence[Request],
        first: Request | None,
        coming: int,
        now_s: float,
    ) -> int:
        return self._limit

    def admits(self, running: int) -> bool:
        return True

    def predict(self, record: StepRecord) -> float:
        return 0.0

    def end_step(self, record: StepRecord) -> None:
        pass


class LatencyBudget:
    """A `PromptBudget` that keeps the inter-token latency within limits.

    The limit of a step is the least of three: the target of the engine; the targets of the requests that decode in it,
    which leave prompts half of the time; and `slowdown` times a usual step, which does not apply if the next prompt would
    miss the target for its first token. A usual step has no prompts, unless nearly all steps have some: long steps then
    make latency no less even, and short chunks would only cost throughput. While most tokens are still to come, as in a
    burst, it has the rows that will decode when all prompts are known.

    Rows in a new power of two decode once without prompts, which shows how long that takes.

    Args:
        most: prompt tokens of a step, whatever its time.
        targets: those of requests without their own.
        slowdown: the limit relative to a usual step; infinite for none.
        sizes: tokens of steps that need no padding, ascending; longer steps need none either. Chunks are cut to fill one.
        totals: of the engine, from which the usual length of answers follows.
    """

    def __init__(
        self,
        most: int,
        targets: RequestTargets,
        slowdown: float = math.inf,
        sizes: Sequence[int] = (),
        totals: Totals | None = None,
    ) -> None:
        self._most, self._targets, self._slowdown, self._sizes = most, targets, slowdown, sizes
        self._totals = totals or Totals()
        self.rate = 0.0
        self._model = StepTimeModel()
        self._pace = 0.0  # prompt tokens per second of the fastest step so far; 0 until one has run
        self._largest = _FIRST_TOKENS  # chunk that was observed
        self._load = StepLoad(0, 0.0, 0, 0.0)  # the decoding rows of the newest step
        self._chunk = float(_FIRST_TOKENS)  # smoothed
        self._probed: set[int] = set()  # powers of two of rows that ran without prompts, although some waited
        self._times_s: deque[float] = deque(maxlen=_USUAL_STEPS)  # of steps that decode
        self._rows: deque[int] = deque(maxlen=_USUAL_STEPS)  # that decoded in these
        self._usual_s = 0.0  # that most of them take; 0 until there are enough
        self._reach = 0.0  # thousands of entries in front of a prompt token, smoothed
        self._in_flight: deque[tuple[StepRecord, StepLoad]] = deque()  # scheduled, oldest first
        self._steps = 0

    @property
    def median_error(self) -> float | None:
        """Return the median relative error of the predictions; None without any."""
        return self._model.median_error

    def tokens(
        self,
        decoding: np.ndarray,
        requests: Sequence[Request],
        first: Request | None,
        coming: int,
        now_s: float,
    ) -> int:
        self._load = load = StepLoad(len(decoding), int(decoding.sum()) / 1e3, 0, 0.0)
        if first is None:
            return self._most
        if self._slowdown < math.inf and self._must_probe(load.rows):
            return 0
        context, left = first.computed / 1e3, first.known - first.computed
        plain_s = self._model.predict(load) or _UNKNOWN_S
        limit_s = self._limit_s(requests, plain_s)
        gentle_s = self._slowdown * max(plain_s, self._usual_s, self._coming_s(load, plain_s, coming, first))
        if gentle_s < limit_s:
            tokens = self._fitting(load, gentle_s, context, left)
            target_s = first.source.targets.over(self._targets).ttft_s
            if target_s == math.inf or left / tokens * gentle_s <= first.order.due_s - now_s:
                return tokens
        return self._fitting(load, limit_s, context, left)

    def _must_probe(self, rows: int) -> bool:
        """Return whether the next step has to show how long `rows` rows take without prompts: once for a power of two."""
        size = size_class(rows)
        if size in self._probed or self._model.decode.has_seen(rows) or not self._pace:
            return False
        self._probed.add(size)
        return True

    def _coming_s(self, load: StepLoad, plain_s: float, coming: int, first: Request) -> float:
        """Return the time of a step with the rows that decode when `coming` more prompts are known.

        It is `plain_s` if more tokens have come in the newest steps than those of these rows will count, and before steps
        have shown how their time grows.
        """
        if not coming or not self._model.knows_prompts or not self._model.decode.shows_growth:
            return plain_s
        totals = self._totals
        answer = totals.generated_tokens / totals.finished if totals.finished >= _FEW_FINISHED else math.inf
        # While prompts are computed, answers end: a prompt takes known / chunk steps, an answer a step per token.
        rows = load.rows + int(min(coming, answer * self._chunk / max(first.known, 1)))
        if rows * min(answer, _COUNTED_TOKENS) <= sum(self._rows):
            return plain_s
        rows = min(rows, int(_FAR * load.rows))
        grown = StepLoad(rows, load.context * rows / load.rows, 0, 0.0)
        then_s, now_s = self._model.decode.predict(grown), self._model.decode.predict(load)
        return plain_s if then_s is None or now_s is None else plain_s + max(0.0, then_s - now_s)

    def _limit_s(self, requests: Sequence[Request], plain_s: float) -> float:
        """Return the longest time of a step in which `requests` decode, and which takes `plain_s` without prompts."""
        default = self._targets.itl_s
        shortest = min(own if (own := r.source.targets.itl_s) < math.inf else default for r in requests)
        return shortest if shortest >= default else min(default, max(shortest, _OWN_SHARE * plain_s))

    def _fitting(self, load: StepLoad, limit_s: float, context: float, length: float = math.inf) -> int:
        """Return the prompt tokens with which a step is predicted to take `limit_s` seconds at most."""
        if limit_s == math.inf:
            return self._most
        fitting = self._model.prompt_tokens_within(load, limit_s, context, length, self._reach)
        if fitting is None:
            fitting = self._roughly_fitting(load, limit_s)
        else:
            fitting = max(_LEAST_TOKENS, min(fitting, _GROWTH * self._largest))
        return self.filling(load.rows, int(min(fitting, self._most)))

    def _roughly_fitting(self, load: StepLoad, limit_s: float) -> float:
        """Return `_fitting` before enough steps with prompts are known.

        A chunk beside decoding rows takes at most as long as the rows alone and the chunk alone.
        """
        alone_s = self._model.predict(load)
        if alone_s is None:
            return _FIRST_TOKENS
        return max(_FIRST_TOKENS, _CAUTION * self._pace * (limit_s - alone_s))

    def filling(self, rows: int, tokens: int) -> int:
        """Return at most `tokens` prompt tokens, so that a step with `rows` more tokens needs no padding."""
        index = bisect_right(self._sizes, rows + tokens)
        if not 0 < index < len(self._sizes):
            return tokens
        filling = self._sizes[index - 1] - rows
        return filling if filling >= (1 - _MOST_CUT) * tokens else tokens

    def admits(self, running: int) -> bool:
        target_s = self._targets.itl_s
        if target_s == math.inf or not running:
            return True
        context = self._load.context / max(self._load.rows, 1)
        needed_s = self._model.predict(StepLoad(running + 1, context * (running + 1), 0, 0.0))
        return needed_s is None or needed_s <= target_s

    def predict(self, record: StepRecord) -> float:
        load = load_of(record)
        self._in_flight.append((record, load))
        return self._model.predict(load) or 0.0

    def end_step(self, record: StepRecord) -> None:
        load = None
        while self._in_flight and load is None:  # a step that failed has no end
            scheduled, found = self._in_flight.popleft()
            load = found if scheduled is record else None
        load = load_of(record) if load is None else load
        self._model.observe(load, record.took_s)
        if record.took_s > 0:
            self._pace = max(self._pace, load.prompt_tokens / record.took_s)
        if load.prompt_tokens and load.rows:
            self._largest = max(self._largest, load.prompt_tokens)
            self._chunk += _CHUNK_SMOOTHING * (load.prompt_tokens - self._chunk)
        if load.rows:
            self._times_s.append(record.took_s)
            self._rows.append(load.rows)
        if load.prompt_tokens:
            self._reach += _SMOOTHING * (load.prompt_context / load.prompt_tokens - self._reach)
        self._steps += 1
        if self._steps % _RATE_STEPS == 0:
            if len(self._times_s) == _USUAL_STEPS:
                self._usual_s = sorted(self._times_s)[_USUAL_STEPS // 4]
            self._estimate_rate()

    def _estimate_rate(self) -> None:
        plain_s = self._model.predict(self._load) or _UNKNOWN_S
        limit_s = min(self._targets.itl_s, self._slowdown * max(plain_s, self._usual_s))
        tokens = self._fitting(self._load, limit_s, self._reach, 0.0)  # all like the average token
        load = self._load._replace(prompt_tokens=tokens, prompt_context=tokens * self._reach)
        took_s = self._model.predict(load)
        self.rate = tokens / took_s if took_s else 0.0
