"""The sampler: logits of a batch to one token per row, for any mix of sampling parameters.

Owns the sampling columns of every slot. Order, as in vLLM: log-probabilities of the raw logits; grammar
mask; allowed ids, bad words, min tokens, bias, penalties; temperature; min_p, top_k, top_p; draw.
Which of these a step needs is read from host columns, so unused features cost nothing. No call waits
for the device, and a row's token depends on that row alone.

From temperature on, everything is `choose`: on a GPU the kernels of kernels/sampling/choose.py, which read what
each row wants on the device, so that it can be captured. A step whose rows do not `need_host_work` is
`choose` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels import available
from quire.sampling import masks as plain_masks
from quire.sampling.columns import RowColumns, SlotTable, TokenColumns, rows_where, to_device
from quire.sampling.filters import FilterFlags, kept
from quire.sampling.logprobs import Logprobs, score
from quire.sampling.noise import gumbel, row_keys
from quire.sampling.on_cpu import contenders, draw, highest
from quire.sampling.options import COLUMN_FIELDS, COLUMN_NAMES, SLOT_COLUMNS, check_claims, is_greedy
from quire.sampling.processors import all_processors
from quire.types import NO_TOKEN, NOT_FINITE, EngineRequest, TokenMasks

_NONE = -1  # no log-probabilities wanted


# logits [n, vocab], slots [n], tokens int32 [n] to fill, slots on the host (if known), may rows have filters
Choose = Callable[[Tensor, Tensor, Tensor, np.ndarray | None, bool], None]


@dataclass(slots=True)
class SampleOutput:
    """Device tensors of one step. `logprobs` rows that did not ask for any hold zeros."""

    tokens: Tensor  # int32 [n]; NOT_FINITE or NO_TOKEN where there is none to choose
    logprobs: Logprobs | None


class Sampler:
    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._table = SlotTable(COLUMN_NAMES, num_slots, device)
        self._processors = all_processors(columns, vocab_size, num_slots, device)
        processed = (name for processor in self._processors for name in processor.fields)
        check_claims((*COLUMN_FIELDS, "logprobs", *processed))
        self._device = device
        self._vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        # What each slot uses, on the host.
        self._greedy = np.ones(num_slots, dtype=np.bool_)
        self._processed = np.zeros(num_slots, dtype=np.bool_)
        self._logprobs = np.full(num_slots, _NONE, dtype=np.int64)
        self._filters = FilterFlags.empty(num_slots)
        self._masked = np.zeros(num_slots, dtype=np.bool_)
        self._choose: Choose = self._with_kernels(vocab_size, num_slots) if available(device) else self._plain
        self._apply_masks = _masks_kernel() if available(device) else plain_masks.apply_masks

    def admit(self, slot: int, request: EngineRequest) -> None:
        """Stage the parameters of the request that takes `slot`, on the host."""
        params = request.params
        used = [processor.add(slot, request) for processor in self._processors]
        self._greedy[slot] = is_greedy(request)
        self._processed[slot] = any(used)
        self._logprobs[slot] = _NONE if params.logprobs is None else params.logprobs
        self._filters.top_k[slot] = max(0, params.top_k)
        self._filters.top_p[slot] = params.top_p < 1
        self._filters.min_p[slot] = params.min_p > 0
        self._masked[slot] = request.grammar is not None
        self._table.stage(slot, {column.name: column.value(request) for column in SLOT_COLUMNS})

    def flush(self) -> None:
        """Send what is staged to the device; call before `sample` in every step that admits."""
        self._table.flush()
        for processor in self._processors:
            processor.flush()

    def sample(
        self, logits: Tensor, slots_host: np.ndarray, slots: Tensor, masks: TokenMasks | None = None
    ) -> SampleOutput:
        """One token for each row of `logits` [n, vocab], which stays as it is.

        `slots` is the device's copy of `slots_host`; `masks` are for some of the rows.
        """
        x = logits
        if masks is not None or self._processed[slots_host].any():
            x = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            if masks is not None:
                self._apply_masks(x, to_device(masks.rows, self._device), to_device(masks.bits, self._device))
            for processor in self._processors:
                processor.apply(x, slots_host, slots)
        tokens = torch.empty(len(slots_host), dtype=torch.int32, device=logits.device)
        self._choose(x, slots, tokens, slots_host, self.has_filters(slots_host))
        return SampleOutput(tokens, self._score(logits, tokens.clamp(min=0), slots_host))

    def choose(self, logits: Tensor, slots: Tensor, tokens: Tensor, filtered: bool = True) -> None:
        """Into `tokens` int32 [n]: one for each row of `logits` [n, vocab], for rows that need no host work.

        On a GPU it can be captured in a graph, which then serves any requests in those slots; with
        `filtered` False, any without filters.
        """
        self._choose(logits, slots, tokens, None, filtered)

    def needs_host_work(self, slots_host: np.ndarray) -> bool:
        """Whether any row wants more than `choose`: changed or masked logits, or log-probabilities."""
        host = self._processed[slots_host] | self._masked[slots_host] | (self._logprobs[slots_host] != _NONE)
        return bool(host.any())

    def has_filters(self, slots_host: np.ndarray) -> bool:
        """Whether any row is drawn under top_k, top_p or min_p."""
        return bool((self._filters.at(slots_host).used & ~self._greedy[slots_host]).any())

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> Logprobs:
        """Log-probabilities of the given tokens int64 [m] under `logits` [m, vocab], and the top k."""
        return score(logits, targets, k)

    def _with_kernels(self, vocab_size: int, num_slots: int) -> Choose:
        from quire.kernels.sampling import row
        from quire.kernels.sampling.choose import Scratch, choose

        assert row.COLUMNS == COLUMN_NAMES
        assert (row.NOT_FINITE.value, row.NO_TOKEN.value) == (NOT_FINITE, NO_TOKEN)
        scratch = Scratch.empty(num_slots, vocab_size, self._device)

        def chosen(
            x: Tensor, slots: Tensor, tokens: Tensor, slots_host: np.ndarray | None, filtered: bool
        ) -> None:
            choose(x, slots, self._table.values, self._columns.num_tokens, scratch, tokens, filtered)

        return chosen

    def _plain(
        self, x: Tensor, slots: Tensor, tokens: Tensor, slots_host: np.ndarray | None, filtered: bool
    ) -> None:
        """The greedy choice of every row, overwritten by a draw where one is wanted."""
        if slots_host is None:
            slots_host = slots.cpu().numpy()
        drawn = ~self._greedy[slots_host]
        if drawn.all():
            tokens.copy_(self._draw(x, slots_host, slots))
        else:
            tokens.copy_(highest(x))
            if drawn.any():
                rows = rows_where(drawn, self._device)
                tokens[rows] = self._draw(x[rows], slots_host[drawn], slots[rows]).int()
        top = x.amax(1)  # NaN where there is any
        tokens.masked_fill_(~(top < math.inf), NOT_FINITE).masked_fill_(top == -math.inf, NO_TOKEN)

    def _draw(self, x: Tensor, slots_host: np.ndarray, slots: Tensor) -> Tensor:
        """Gumbel-max over the tokens that the filters keep: argmax of logit / temperature + noise."""
        columns = self._table.gather(slots)
        # By the reciprocal, as in the kernels: both see the same bits.
        scale = columns.float32("temperature").reciprocal().unsqueeze(1)
        x = x.to(torch.float32, copy=True).mul_(scale)  # [r, vocab]
        x.nan_to_num_(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
        k0, k1 = self._keys(columns, slots)
        flags = self._filters.at(slots_host)
        if not flags.any:
            return highest(x.add_(gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)))
        if self._device.type == "cpu":
            return self._draw_on_cpu(x, flags, columns, k0, k1)
        found = kept(x, flags, columns)
        first = x.argmax(1)
        x = x.masked_fill(x < found.cutoff, -math.inf)
        x += gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)
        return torch.where(found.greedy, first, x.argmax(1))

    def _draw_on_cpu(
        self, x: Tensor, flags: FilterFlags, columns: RowColumns, k0: Tensor, k1: Tensor
    ) -> Tensor:
        """The same, looking at few tokens where every row has a small top_k. Counting costs no wait here."""
        few = contenders(x, int(flags.top_k.max())) if flags.top_k.all() else None
        found = None if few is None else kept(few.values, flags, columns)
        if few is None or found is None or bool((few.rest >= found.cutoff).any()):  # a token left out is kept
            found = kept(x, flags, columns)
            tokens = draw(x, x >= found.cutoff, None, x.shape[1], k0, k1)
        else:
            tokens = draw(few.values, few.values >= found.cutoff, few.tokens, x.shape[1], k0, k1)
        if bool(found.greedy.any()):
            tokens[found.greedy] = highest(x[found.greedy])
        return tokens

    def _keys(self, columns: RowColumns, slots: Tensor) -> tuple[Tensor, Tensor]:
        position = self._columns.num_tokens[slots]
        return row_keys(columns.int32("seed_low"), columns.int32("seed_high"), position)

    def _score(self, logits: Tensor, tokens: Tensor, slots_host: np.ndarray) -> Logprobs | None:
        wanted = self._logprobs[slots_host]
        if (wanted == _NONE).all():
            return None
        rows = rows_where(wanted != _NONE, self._device)
        part = score(logits[rows], tokens[rows].long(), int(wanted.max()))
        if isinstance(rows, slice):
            return part
        ids, values, ranks = (t.new_zeros((len(wanted), *t.shape[1:])) for t in part)
        ids[rows], values[rows], ranks[rows] = part
        return ids, values, ranks


def _masks_kernel() -> Callable[[Tensor, Tensor, Tensor], None]:
    from quire.kernels.sampling.masks import apply_masks

    return apply_masks
