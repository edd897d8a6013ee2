"""Shapes of captured steps: which exist, which are captured before the first request, and which stand in for others.

A graph is captured for fixed numbers of rows and tokens, and a step with fewer of them is padded with dummies. So a new
shape needs no capture if the graph of a larger one is there: the step runs at once, at the price of the padding. A shape
is captured exactly when the padding that it has cost adds up to about the cost of a capture (rent until you have paid
the price, then buy: at most twice the cost of knowing the future).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from quire.models.decoder import NO_BRIEF_STEPS, BriefSteps
from quire.types import COMMON_STEP_TOKENS
from quire.worker.step.step_stages import FILTERED_TOKENS, LOGITS, TOKENS, Prefix

MAX_GRAPHS = 512  # of one runner
FULL_TOKENS = (
    8192  # the longest step that is captured without padding: launching it takes less time than running it
)
PADDED_TOKENS = 2048  # the longest step with prompts that is captured with padding
_BUY_AT_STEPS = 3.0  # a capture takes about as long as 3 steps
_MAX_EXCESS = 0.9  # a stand-in that wastes more of a step is worse than running eagerly
_TAIL = 0.1  # of a step: cost of sampling operation by operation after a graph that ends with the logits
_BRIEF = 0.2  # of a step: cost of running a brief step as others

_STAND_IN_ROWS = (32, 256, 1024)
_MIDDLE_ROWS, _MIDDLE_TOKENS = 64, 256  # short steps of so many rows: their next stand-in has 384 tokens
_STAND_IN_DECODE_ROWS = (1, 4, 16, 64, 256, 1024)
_SHARING_ROWS = (16, 64, 128, 256, 512, 1024)
_START_DRAFT_ROWS = 64  # steps with draft tokens for up to so many rows are captured before the first request
_START_ROWS = 256  # decode steps of up to so many rows are captured before the first request


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """Bounds on the steps that are captured."""

    max_rows: int
    max_tokens: int  # of a step with prompts that is padded
    full_tokens: int  # the token budget of a step, which is captured without padding; 0: it is not captured
    shared_bytes: int  # about the memory of the largest captured step
    max_graphs: int
    drafts: int = 0  # most draft tokens of a row
    max_logit_rows: int = 0  # of a step; 0: `max_rows`
    at_start: bool = True  # capture common shapes before the first request
    brief: BriefSteps = NO_BRIEF_STEPS  # which the model runs in another way

    @classmethod
    def of_sizes(cls, max_rows: int, step_tokens: int, **others: Any) -> GraphLimits:
        """Return the limits of an engine whose steps have up to `step_tokens` tokens."""
        return cls(
            max_rows=max_rows,
            max_tokens=min(step_tokens, PADDED_TOKENS),
            full_tokens=step_tokens if step_tokens <= FULL_TOKENS else 0,
            **others,
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a captured step. With as many tokens as rows, each row has one token.

    Rows may have up to `drafts` draft tokens, each of which adds a row of logits.
    """

    rows: int
    tokens: int
    prefix: Prefix = TOKENS  # the stages that are captured
    shares: bool = False  # rows share blocks that attention reads once
    drafts: int = 0
    brief: bool = False  # the model runs it as one of its brief steps

    @property
    def one_each(self) -> bool:
        return self.rows == self.tokens

    @property
    def decodes_only(self) -> bool:
        return decodes_only(self.rows, self.tokens, self.drafts)

    @property
    def logit_rows(self) -> int:
        return most_logit_rows(self.rows, self.tokens, self.drafts)

    def stands_in_for(self, other: StepShape) -> bool:
        """Return True if a graph of this shape can run a step of `other`.

        A graph that ends with the logits does for every kind of sampling.
        """
        return (
            self.decodes_only == other.decodes_only
            and self.rows >= other.rows
            and self.tokens >= other.tokens
            and self.shares == other.shares
            and (other.brief or not self.brief)
            and bool(self.drafts) == bool(other.drafts)
            and self.drafts >= other.drafts
            and self.prefix in (other.prefix, LOGITS)
            and self.excess_over(other) <= _MAX_EXCESS
        )

    def excess_over(self, other: StepShape) -> float:
        """Return about the share of a step that is lost if this shape stands in for `other`."""
        lost = (_TAIL if self.prefix != other.prefix else 0.0) + (
            _BRIEF if self.brief != other.brief else 0.0
        )
        return (self.tokens - other.tokens) / self.tokens + lost


class StepShapes:
    """The shapes within `limits`."""

    def __init__(self, limits: GraphLimits) -> None:
        self._limits = limits
        self.row_sizes, self.token_sizes = row_sizes(limits.max_rows), token_sizes(limits.max_tokens)

    def fit(
        self,
        rows: int,
        tokens: int,
        prefix: Prefix,
        shares: bool,
        drafts: int = 0,
        longest: int = 1,
        brief: bool = False,
    ) -> StepShape | None:
        """Return the smallest shape that holds a step, or None if such steps are not captured.

        Args:
            rows: number of rows.
            tokens: number of tokens.
            prefix: the stages to capture.
            shares: whether rows share blocks.
            drafts: most draft tokens of a row.
            longest: most tokens of a row; read if there are drafts.
            brief: whether it is a brief step of the model.
        """
        if drafts:
            return self._fit_drafts(rows, tokens, prefix, drafts, longest)
        if rows == tokens:
            size = _round_up(self.row_sizes, rows)
            return StepShape(size, size, prefix, shares, brief=brief and size <= self._limits.brief.rows)
        is_full = tokens == self._limits.full_tokens
        if tokens > self.token_sizes[-1] and not is_full:
            return None
        # Few row sizes are enough: a padding row costs little beside the tokens of the others.
        rows = min(max(8, 1 << (rows - 1).bit_length()), self.row_sizes[-1])
        if not is_full:
            tokens = _round_up(self.token_sizes, max(tokens, rows + 1))
        return StepShape(rows, tokens, prefix) if tokens > rows else None

    def _fit_drafts(
        self, rows: int, tokens: int, prefix: Prefix, drafts: int, longest: int
    ) -> StepShape | None:
        size = _round_up(self.row_sizes, rows)
        if longest <= 1 + drafts:
            return self._draft_shape(size, size * (1 + drafts), prefix, drafts)
        size = _round_up(self.row_sizes, 1 << (rows - 1).bit_length())
        tokens = max(tokens, size * (1 + drafts) + 1)  # more than if all rows decoded
        if tokens > self.token_sizes[-1]:
            return None
        return self._draft_shape(size, _round_up(self.token_sizes, tokens), prefix, drafts)

    def _draft_shape(self, rows: int, tokens: int, prefix: Prefix, drafts: int) -> StepShape | None:
        shape = StepShape(rows, tokens, prefix, drafts=drafts)
        most = self._limits.max_logit_rows or self._limits.max_rows
        fits = tokens <= self.token_sizes[-1] and shape.logit_rows <= most
        return shape if fits else None

    def _at_start_with_drafts(self) -> list[StepShape]:
        most = self._limits.drafts
        sizes = [size for size in self.row_sizes if most and size <= _START_DRAFT_ROWS]
        shapes = (self._draft_shape(size, size * (1 + most), TOKENS, most) for size in sizes)
        return [shape for shape in shapes if shape is not None]

    def at_start(self) -> list[StepShape]:
        """Return the shapes to capture before the first request, the most useful first, without duplicates.

        These are a coarse grid of stand-ins for all steps, and decode steps in all sizes up to 256 rows, without and with
        filters: many models come with top_k and top_p.
        """
        return self._common() if self._limits.at_start else []

    def with_all_kernels(self) -> list[StepShape]:
        """Return shapes of `at_start` that need all of its kernels, the ones that take longest to compile first.

        The kernel of draws with filters takes longest, and steps with filters come last in `at_start`. They also need
        the kernels of shorter prefixes.
        """
        found: dict[StepShape, StepShape] = {}
        for shape in reversed(self.at_start()):
            found.setdefault(replace(shape, prefix=TOKENS), shape)
        return list(found.values())

    def _common(self) -> list[StepShape]:
        most = self.row_sizes[-1]
        sizes = [size for size in self.row_sizes if size <= _START_ROWS or size == most]
        logits = [StepShape(rows, rows, LOGITS) for rows in self._clipped(_STAND_IN_DECODE_ROWS)]
        sharing = [StepShape(rows, rows, TOKENS, True) for rows in self._clipped(_SHARING_ROWS)]
        longest = self.token_sizes[-1]
        tokens = dict.fromkeys(min(size, longest) for size in COMMON_STEP_TOKENS)
        mixed = [
            StepShape(rows, count, LOGITS)
            for rows in self._clipped(_STAND_IN_ROWS)
            for count in tokens
            if count > rows
        ]
        if self.row_sizes[-1] > _MIDDLE_ROWS:
            short = [count for count in tokens if _MIDDLE_ROWS < count <= _MIDDLE_TOKENS]
            mixed += [StepShape(_MIDDLE_ROWS, count, LOGITS) for count in short]
        if self._limits.full_tokens > longest:
            mixed += [
                StepShape(rows, self._limits.full_tokens, LOGITS) for rows in self._clipped(_STAND_IN_ROWS)
            ]
        brief = [
            StepShape(size, size, prefix, brief=True)
            for prefix in (TOKENS, FILTERED_TOKENS, LOGITS)
            for size in self.row_sizes
            if size <= self._limits.brief.rows
        ]
        return self._up_to_half(
            [*logits, *brief, *sharing, *mixed, *self._at_start_with_drafts(), *self._decoding(sizes)]
        )

    def when_idle(self) -> list[StepShape]:
        """Return all shapes to capture while the engine is idle, the most useful first."""
        return self._up_to_half(list(dict.fromkeys([*self._common(), *self._decoding(self.row_sizes)])))

    @staticmethod
    def _decoding(sizes: Iterable[int]) -> list[StepShape]:
        return [StepShape(size, size, prefix) for prefix in (TOKENS, FILTERED_TOKENS) for size in sizes]

    def _up_to_half(self, shapes: list[StepShape]) -> list[StepShape]:
        """Leave half of the graphs to shapes that turn out to be common: a small GPU has room for few."""
        return shapes[: self._limits.max_graphs // 2]

    def _clipped(self, sizes: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(min(size, self.row_sizes[-1]) for size in sizes))


class StandIns:
    """Choice between a captured shape that stands in for a new one, and capturing the new one."""

    def __init__(self) -> None:
        self._lost: defaultdict[StepShape, float] = defaultdict(float)  # steps' worth of padding by shape
        self._found: dict[StepShape, StepShape | None] = {}  # while the captured shapes stay the same

    def choose(
        self, shape: StepShape, captured: Iterable[StepShape], may_capture: bool
    ) -> tuple[StepShape, bool]:
        """Return the shape to run a step of the new `shape` with, and whether to capture `shape` now.

        The shape is one of `captured`, or `shape` itself if none stands in for it.
        """
        if shape not in self._found:
            fitting = (other for other in captured if other.stands_in_for(shape))
            self._found[shape] = min(fitting, key=lambda other: other.excess_over(shape), default=None)
        stand_in = self._found[shape]
        if stand_in is None:
            return shape, True
        self._lost[shape] += stand_in.excess_over(shape)
        return stand_in, may_capture and self._lost[shape] >= _BUY_AT_STEPS

    def forget(self) -> None:
        """Note that the set of captured shapes has changed."""
        self._found.clear()


def most_logit_rows(rows: int, tokens: int, drafts: int) -> int:
    """Return an upper bound of the logit rows of a step: each row has 1 + up to `drafts`, and no more than tokens."""
    return min(tokens, rows * (1 + drafts))


def decodes_only(rows: int, tokens: int, drafts: int) -> bool:
    """Return whether a shape is for rows that only decode, with up to 1 + `drafts` tokens each."""
    return tokens == rows * (1 + drafts)


def _round_up(sizes: list[int], wanted: int) -> int:
    """Return the least of the ascending `sizes` that is at least `wanted`, or the largest size."""
    return sizes[min(bisect.bisect_left(sizes, wanted), len(sizes) - 1)]


def row_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows to capture, ascending: close together where few rows make a step cheap."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 4097, 32)}
    return [*sorted(size for size in sizes if size < max_rows), max_rows]


def token_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture for steps with prompts, ascending.

    From 128 tokens on, at most a ninth of a step is padding.
    """
    sizes = {
        *range(16, 65, 16),
        80,
        96,
        112,
        *(base * part // 8 for base in (128, 256, 512, 1024) for part in range(8, 17)),
    }
    return [*sorted(size for size in sizes if size < max_tokens), max_tokens]
