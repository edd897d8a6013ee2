"""A model of the time of a step, fitted to the steps that have run.

The time is linear in what a step does: its decoding rows and the entries that they read, its prompt tokens and the
entries that these read, and a constant for each kind of step. The newest steps are fitted by least squares of the
error relative to the prediction, so the model follows the machine and the operating point. That a real step is linear only near the
operating point is enough: predictions are asked for near it.
"""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from typing import NamedTuple

import numpy as np

from quire.core.steplog import StepRecord

_WINDOW = 256  # newest steps of each kind that are fitted
_LEAST = 6  # steps of a kind before it is predicted
_NEWEST = 8  # steps of each power of two of rows from which other numbers of rows are predicted
_DECODING = 3  # terms that do not concern prompts
_REFIT = 8  # steps between two fits, and later the share of the window that is new
_NEAR, _NEARNESS = 24, 0.03  # steps at least that show how a step varies; all with so similar predictions do
_EXTREME = 2  # longest and shortest of them that do not count: some captured a graph beside another step
_MOST_RATIO = 5.0  # actual over predicted time of steps that count, or predicted over actual
_RIDGE = 1e-4  # keeps coefficients small that the window does not tell apart
_MOST_LATE = (
    1.5  # beyond it a step captured a graph or the machine was disturbed, which smaller steps do not help
)
_LATE = 0.995  # quantile of actual over predicted time that a cautious prediction covers


class StepLoad(NamedTuple):
    """What a step does. `context` and `prompt_context` count thousands of entries that attention reads."""

    rows: int  # that decode
    context: float
    prompt_tokens: int
    prompt_context: float  # entries in front of each prompt token, summed

    @property
    def features(self) -> tuple[float, ...]:
        """Return the terms of the linear model; those of prompts are 0 without any."""
        return 1.0, self.rows, self.context, self.prompt_tokens, self.prompt_context


def load_of(record: StepRecord) -> StepLoad:
    """Return what the step of a record does. Rows of one token count as decoding; so do drafts if there is no prompt."""
    starts, counts = record.rows.starts, record.rows.counts
    if not record.prompt_tokens:
        return StepLoad(record.num_tokens, (int(starts.sum()) + record.num_tokens) / 1e3, 0, 0.0)
    decodes, counts = counts == 1, counts.astype(np.int64)  # the product may exceed 31 bits
    reads = np.where(decodes, starts + counts, counts * (starts + counts // 2))
    rows, context = int(np.count_nonzero(decodes)), int(reads[decodes].sum())
    prompt_context = int(reads.sum()) - context
    return StepLoad(rows, context / 1e3, record.num_tokens - rows, prompt_context / 1e3)


class LinearFit:
    """A least-squares fit of the relative error over a window, with coefficients that are not negative."""

    def __init__(self, width: int) -> None:
        self.weights = np.zeros(width)
        self._weights = self.weights.tolist()  # a sum of a few Python numbers is faster than numpy
        self.late = 1.0  # actual over predicted time that few steps exceed
        self._predicted_s = self._ratios = np.ones(
            1
        )  # of each step that was fitted; actual over predicted time
        self._features: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)
        self._times_s: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0

    def __len__(self) -> int:
        return len(self._times_s)

    def predict(self, features: tuple[float, ...]) -> float | None:
        """Return the seconds of a step; None while too few have been observed."""
        return None if len(self) < _LEAST else sum(map(mul, self._weights, features))

    def observe(self, features: tuple[float, ...], took_s: float) -> None:
        """Learn from a step that took `took_s` seconds."""
        self._features.append(features)
        self._times_s.append(took_s)
        self._since += 1
        if self._since >= max(_REFIT, len(self) // _REFIT) or len(self) <= 2 * _LEAST:
            self._fit()

    def ratios(self, predicted_s: float) -> np.ndarray:
        """Return actual over predicted time of those steps that were predicted to take about `predicted_s` seconds.

        Steps are padded to some sizes and captured up to a size, so the ratios of others say less about such a step.
        """
        distance = np.abs(np.log(self._predicted_s / predicted_s))
        reach = max(_NEARNESS, np.sort(distance)[: min(_NEAR, len(distance))][-1])
        near = np.sort(self._ratios[distance <= reach])
        return near[_EXTREME:-_EXTREME] if len(near) > 4 * _EXTREME else near

    def errors(self) -> np.ndarray:
        """Return the relative errors of the fit over its window."""
        if len(self) < _LEAST:
            return np.empty(0)
        times = np.array(self._times_s)
        return np.abs(np.array(self._features) @ self.weights - times) / times

    def newest(self, count: int) -> list[tuple[tuple[float, ...], float]]:
        """Return the terms and seconds of the newest steps, at most `count`."""
        return list(zip(self._features, self._times_s, strict=True))[-count:]

    def _fit(self) -> None:
        self._since = 0
        features, times = np.array(self._features), np.array(self._times_s)
        self.weights, kept = _robust_fit(features, times)
        self._weights = self.weights.tolist()
        self._predicted_s = np.maximum(features[kept] @ self.weights, 1e-9)
        self._ratios = times[kept] / self._predicted_s
        usual = self._ratios[self._ratios <= _MOST_LATE]
        self.late = max(1.0, float(np.quantile(usual, _LATE))) if len(usual) else 1.0


def _robust_fit(features: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights that fit `features @ weights` to `times`, and which steps count, bool [steps].

    Errors relative to the time itself count a short step more than a long one of the same work. That makes a first pass
    robust against steps that took very long, such as the first of a shape, but it predicts less than the mean. So a
    second pass leaves those out and takes errors relative to the prediction. Neither must follow a step that seemed to
    take no time, because the host noticed its end together with that of the next one.
    """
    scales = np.maximum(times, np.median(times) / _MOST_RATIO)
    predicted = np.maximum(features @ _solve(features, times, scales), 1e-9)
    kept = (times <= _MOST_RATIO * predicted) & (times >= predicted / _MOST_RATIO)
    if kept.sum() < min(_LEAST, len(times)):
        kept[:] = True
    return _solve(features[kept], times[kept], predicted[kept]), kept


def _solve(features: np.ndarray, times: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the non-negative weights with the least squared error of `features @ weights`, each divided by its scale."""
    width = np.maximum(features.max(0), 1e-9)
    relative, wanted = features / width / scales[:, None], times / scales
    active, weights = np.ones(features.shape[1], bool), np.zeros(features.shape[1])
    while active.any():
        part = relative[:, active]
        gram = part.T @ part
        gram += _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        found = np.linalg.solve(gram, part.T @ wanted)
        if (found >= 0).all():
            weights[active] = found
            break
        active[np.flatnonzero(active)[found < 0]] = False
    return weights / width


class DecodeTimes:
    """The times of steps without prompts: a fit for each power of two of rows, which run different kernels.

    Numbers of rows that have not run yet are predicted from the newest steps of all others.
    """

    def __init__(self) -> None:
        self._fits: dict[int, LinearFit] = {}
        self._weights: list[float] | None = None  # of the fit over all; None: to be computed
        self._least, self._most = math.inf, 0  # rows that have run

    def has_seen(self, rows: int) -> bool:
        """Return whether a step of about so many rows has run."""
        return size_class(rows) in self._fits

    def observe(self, load: StepLoad, took_s: float) -> None:
        """Learn from a step that took `took_s` seconds."""
        size = size_class(load.rows)
        if size not in self._fits:
            self._fits[size] = LinearFit(_DECODING)
        self._fits[size].observe(load.features[:_DECODING], took_s)
        self._weights = None
        self._least, self._most = min(self._least, load.rows), max(self._most, load.rows)

    @property
    def shows_growth(self) -> bool:
        """Return whether the numbers of rows that have run differ enough to tell how the time grows with them."""
        return self._most >= 2 * self._least

    def fit_for(self, rows: int) -> LinearFit | None:
        """Return the fit for `rows` rows, or for the next power of two; None if neither has been observed enough."""
        wanted = size_class(rows)
        for size in (wanted, wanted - 1, wanted + 1):
            if (fit := self._fits.get(size)) is not None and len(fit) >= _LEAST:
                return fit
        return None

    def predict(self, load: StepLoad) -> float | None:
        """Return the seconds of a step; None if too little is known."""
        if (fit := self.fit_for(load.rows)) is not None:
            return fit.predict(load.features[:_DECODING])
        if len(self._fits) < 2 and not self.has_seen(load.rows):
            return None
        if self._weights is None:
            features, times = zip(*(step for fit in self._fits.values() for step in fit.newest(_NEWEST)))
            self._weights = _robust_fit(np.array(features), np.array(times))[0].tolist()
        return sum(map(mul, self._weights, load.features))

    def errors(self) -> list[np.ndarray]:
        """Return the relative errors of each fit over its window."""
        return [fit.errors() for fit in self._fits.values()]

    @property
    def is_ready(self) -> bool:
        """Return whether any number of rows has been observed enough."""
        return any(len(fit) >= _LEAST for fit in self._fits.values())


class StepTimeModel:
    """The times of steps without prompts, and a fit for those with prompts."""

    def __init__(self) -> None:
        self.decode = DecodeTimes()
        self._mixed = LinearFit(5)

    def predict(self, load: StepLoad) -> float | None:
        """Return the seconds of a step; None while too few of its kind have been observed."""
        alone = self.decode.predict(load)
        if not load.prompt_tokens and alone is not None:
            return alone
        mixed = self._mixed.predict(load.features)
        # A step takes no less time than its decoding rows alone, which a line may deny for few prompt tokens.
        return mixed if mixed is None or alone is None else max(mixed, alone)

    def ratios(self, load: StepLoad) -> np.ndarray:
        """Return actual over predicted time of the observed steps that are most like `load`."""
        fit = self._mixed if load.prompt_tokens else self.decode.fit_for(load.rows)
        return (self._mixed if fit is None else fit).ratios(max(self.predict(load) or 0.0, 1e-9))

    def observe(self, load: StepLoad, took_s: float) -> None:
        """Learn from a step that took `took_s` seconds."""
        if took_s <= 0:
            return
        if load.prompt_tokens:
            self._mixed.observe(load.features, took_s)
        else:
            self.decode.observe(load, took_s)

    def prompt_tokens_within(
        self, load: StepLoad, seconds: float, context: float, length: float = math.inf, reach: float = 0.0
    ) -> float | None:
        """Return how many prompt tokens fit into a step of `seconds`, so that few such steps take longer.

        Args:
            load: the decoding rows of the step.
            seconds: longest time of the step.
            context: thousands of entries in front of the first prompt token.
            length: tokens of the first prompt from there on.
            reach: thousands of entries in front of a token of the prompts behind it.

        Returns:
            The number, which may be negative; None while too few steps with prompts have been observed.
        """
        if len(self._mixed) < _LEAST:
            return None
        weights = self._mixed.weights
        base = float(weights[:_DECODING] @ np.array(load.features[:_DECODING]))
        left = seconds / self._mixed.late - base
        # A token also reads the tokens of its prompt in the chunk in front of it: half of them on average.
        square, line = float(weights[4]) / 2e3, max(float(weights[3] + weights[4] * context), 1e-12)
        if left <= 0 or square * left < 1e-6 * line**2:
            return left / line
        tokens = (math.sqrt(line**2 + 4 * square * left) - line) / (2 * square)
        if tokens <= length:
            return tokens
        left -= (line + square * length) * length
        return length + left / max(float(weights[3] + weights[4] * reach), 1e-12)

    @property
    def knows_prompts(self) -> bool:
        """Return whether steps with prompts can be predicted."""
        return len(self._mixed) >= _LEAST

    @property
    def is_ready(self) -> bool:
        """Return whether steps of both kinds can be predicted."""
        return self.decode.is_ready and self.knows_prompts

    @property
    def median_error(self) -> float | None:
        """Return the median relative error over the steps that are fitted; None without any."""
        errors = np.concatenate([*self.decode.errors(), self._mixed.errors()])
        return float(np.median(errors)) if len(errors) else None


def size_class(rows: int) -> int:
    """Return the number of the power of two that `rows` rows are rounded up to."""
    return max(rows - 1, 0).bit_length()
