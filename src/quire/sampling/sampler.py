"""`Sampler`: chooses one token per row from a batch of logits, for any mix of sampling parameters.

The order is that of vLLM: log-probabilities of the raw logits; grammar mask; allowed ids, bad words, min tokens,
bias, penalties; temperature; min_p, top_k, top_p; draw. Host columns determine which of these a step needs, so
unused features cost nothing. No call waits for the device. A row's token depends on that row alone.

A request that verifies draft tokens has one row of logits per draft and one more. The noise of a draw depends on the
seed and the position only, so a request draws the same tokens with drafts as without.

`choose` covers everything from the temperature on. On a GPU it launches the kernels of kernels/sampling/choose.py,
which read each row's parameters on the device, so it can be captured in a graph. A step whose rows do not need
host work (`needs_host_work`) consists of `choose` alone.
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
from quire.sampling.columns import LogitRows, RowColumns, SlotTable, TokenColumns, rows_where, to_device
from quire.sampling.filters import FilterFlags, find_cutoffs
from quire.sampling.logprobs import Logprobs, score
from quire.sampling.noise import gumbel, row_keys
from quire.sampling.on_cpu import draw, highest, top_candidates
from quire.sampling.options import COLUMN_FIELDS, COLUMN_NAMES, SLOT_COLUMNS, check_claims, is_greedy
from quire.sampling.processors import all_processors
from quire.types import NO_TOKEN, NOT_FINITE, EngineRequest, TokenMasks

_NONE = -1  # no log-probabilities requested


# Arguments: logits [n, vocab]; slots [n]; lengths int32 [n]; tokens int32 [n], the output; slots on the host, if known;
# whether any row may have filters.
Choose = Callable[[Tensor, Tensor, Tensor, Tensor, np.ndarray | None, bool], None]


@dataclass(slots=True)
class SampleOutput:
    """The results of one step, on the device. In `logprobs`, rows that requested none hold zeros."""

    tokens: Tensor  # int32 [n]; NOT_FINITE or NO_TOKEN if no token could be chosen
    logprobs: Logprobs | None


class Sampler:
    """Owner of the sampling columns of all slots."""

    def __init__(
        self,
        columns: TokenColumns,
        vocab_size: int,
        num_slots: int,
        device: torch.device,
        max_rows: int | None = None,
    ) -> None:
        """Allocate the columns of `num_slots` slots.

        Args:
            max_rows: most rows of logits of a step, which sizes scratch memory on a GPU. None: `num_slots`.
        """
        self._columns = columns
        self._table = SlotTable(COLUMN_NAMES, num_slots, device)
        self._processors = all_processors(columns, vocab_size, num_slots, device)
        processed = (name for processor in self._processors for name in processor.fields)
        check_claims((*COLUMN_FIELDS, "logprobs", *processed))
        self._device = device
        self._vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        # Host columns: the features that each slot uses.
        self._greedy = np.ones(num_slots, dtype=np.bool_)
        self._processed = np.zeros(num_slots, dtype=np.bool_)
        self._logprobs = np.full(num_slots, _NONE, dtype=np.int64)
        self._filters = FilterFlags.empty(num_slots)
        self._on_host = np.zeros(num_slots, dtype=np.bool_)  # as `needs_host_work`
        self._filtered = np.zeros(num_slots, dtype=np.bool_)  # as `has_filters`
        self._choose: Choose = (
            self.kernel_choice(vocab_size, max_rows or num_slots) if available(device) else self.choose_plain
        )
        self._apply_masks = _masks_kernel() if available(device) else plain_masks.apply_masks

    @property
    def table(self) -> SlotTable:
        """Return the slot columns that `choose` reads, named in sampling/options.py."""
        return self._table

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
        self._on_host[slot] = (
            self._processed[slot] or request.grammar is not None or params.logprobs is not None
        )
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._filtered[slot] = filtered and not self._greedy[slot]
        self._table.stage(slot, {column.name: column.value(request) for column in SLOT_COLUMNS})

    def flush(self) -> None:
        """Send the staged parameters to the device. Call it before `sample` in every step that admits requests."""
        self._table.flush()
        for processor in self._processors:
            processor.flush()

    def sample(
        self,
        logits: Tensor,
        slots_host: np.ndarray,
        slots: Tensor,
        masks: TokenMasks | None = None,
        lengths: Tensor | None = None,
    ) -> SampleOutput:
        """Choose one token for each row of `logits`.

        Args:
            logits: [n, vocab]; not modified.
            slots_host: request slot of each row.
            slots: the device copy of `slots_host`, int64 [n].
            masks: grammar masks of some of the rows.
            lengths: number of tokens in front of the new one, int32 [n]; None: the known tokens of the slots.
        """
        rows = LogitRows(slots_host, slots, self._lengths(slots, lengths))
        x = logits
        if masks is not None or self._processed[slots_host].any():
            x = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            if masks is not None:
                self._apply_masks(x, to_device(masks.rows, self._device), to_device(masks.bits, self._device))
            for processor in self._processors:
                processor.apply(x, rows)
        tokens = torch.empty(len(slots_host), dtype=torch.int32, device=logits.device)
        self._choose(x, slots, rows.lengths, tokens, slots_host, self.has_filters(slots_host))
        return SampleOutput(tokens, self._score(logits, tokens.clamp(min=0), slots_host))

    def _lengths(self, slots: Tensor, lengths: Tensor | None) -> Tensor:
        return self._columns.num_tokens[slots] if lengths is None else lengths

    def choose(
        self,
        logits: Tensor,
        slots: Tensor,
        tokens: Tensor,
        filtered: bool = True,
        lengths: Tensor | None = None,
    ) -> None:
        """Choose one token for each row, if no row needs host work.

        On a GPU the call can be captured in a graph, which then serves any requests in those slots.

        Args:
            logits: [n, vocab].
            slots: request slot of each row, int64 [n].
            tokens: the output, int32 [n].
            filtered: whether rows may have filters. A graph captured with False serves only rows without.
            lengths: number of tokens in front of the new one, int32 [n]; None: the known tokens of the slots.
        """
        self._choose(logits, slots, self._lengths(slots, lengths), tokens, None, filtered)

    def needs_host_work(self, slots_host: np.ndarray) -> bool:
        """Return whether any row needs more than `choose`: edited or masked logits, or log-probabilities."""
        return bool(np.count_nonzero(self._on_host[slots_host]))

    def has_filters(self, slots_host: np.ndarray) -> bool:
        """Return whether any row is drawn with top_k, top_p or min_p."""
        return bool(np.count_nonzero(self._filtered[slots_host]))

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> Logprobs:
        """Score `targets` int64 [m] under `logits` [m, vocab], with the top k tokens: see `score`."""
        return score(logits, targets, k)

    def kernel_choice(self, vocab_size: int, max_rows: int) -> Choose:
        """Return the launch of the choice kernels, with scratch memory allocated once."""
        from quire.kernels.sampling import row
        from quire.kernels.sampling.choose import Scratch, choose

        assert row.COLUMNS == COLUMN_NAMES
        assert (row.NOT_FINITE.value, row.NO_TOKEN.value) == (NOT_FINITE, NO_TOKEN)
        scratch = Scratch.empty(max_rows, vocab_size, self._device)

        def launch(
            x: Tensor,
            slots: Tensor,
            lengths: Tensor,
            tokens: Tensor,
            slots_host: np.ndarray | None,
            filtered: bool,
        ) -> None:
            choose(x, slots, self._table.values, lengths, scratch, tokens, filtered)

        return launch

    def choose_plain(
        self,
        x: Tensor,
        slots: Tensor,
        lengths: Tensor,
        tokens: Tensor,
        slots_host: np.ndarray | None,
        filtered: bool,
    ) -> None:
        """Choose in plain PyTorch: greedily for every row, then by a draw for rows that are not greedy."""
        if slots_host is None:
            slots_host = slots.cpu().numpy()
        drawn = ~self._greedy[slots_host]
        if drawn.all():
            tokens.copy_(self._draw(x, slots_host, slots, lengths))
        else:
            tokens.copy_(highest(x))
            if drawn.any():
                rows = rows_where(drawn, self._device)
                tokens[rows] = self._draw(x[rows], slots_host[drawn], slots[rows], lengths[rows]).int()
        top = x.amax(1)  # NaN if the row holds one
        tokens.masked_fill_(~(top < math.inf), NOT_FINITE).masked_fill_(top == -math.inf, NO_TOKEN)

    def _draw(self, x: Tensor, slots_host: np.ndarray, slots: Tensor, lengths: Tensor) -> Tensor:
        """Draw by the Gumbel-max trick: argmax of logit / temperature + noise over the tokens kept by filters."""
        columns = self._table.gather(slots)
        # The kernels multiply by the reciprocal too, so both compute the same bits.
        scale = columns.float32("temperature").reciprocal().unsqueeze(1)
        x = x.to(torch.float32, copy=True).mul_(scale)  # [r, vocab]
        x.nan_to_num_(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
        k0, k1 = row_keys(columns.int32("seed_low"), columns.int32("seed_high"), lengths)
        flags = self._filters.at(slots_host)
        if not flags.any:
            return highest(x.add_(gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)))
        if self._device.type == "cpu":
            return self._draw_on_cpu(x, flags, columns, k0, k1)
        cutoffs = find_cutoffs(x, flags, columns)
        first = x.argmax(1)
        x = x.masked_fill(x < cutoffs.cutoff, -math.inf)
        x += gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)
        return torch.where(cutoffs.greedy, first, x.argmax(1))

    def _draw_on_cpu(
        self, x: Tensor, flags: FilterFlags, columns: RowColumns, k0: Tensor, k1: Tensor
    ) -> Tensor:
        """Draw on a CPU, from a few candidates if every row has a small top_k."""
        few = top_candidates(x, int(flags.top_k.max())) if flags.top_k.all() else None
        cutoffs = None if few is None else find_cutoffs(few.values, flags, columns)
        # If a token outside the candidates is kept too, all tokens have to be considered.
        if few is None or cutoffs is None or bool((few.rest >= cutoffs.cutoff).any()):
            cutoffs = find_cutoffs(x, flags, columns)
            tokens = draw(x, x >= cutoffs.cutoff, None, x.shape[1], k0, k1)
        else:
            tokens = draw(few.values, few.values >= cutoffs.cutoff, few.tokens, x.shape[1], k0, k1)
        if bool(cutoffs.greedy.any()):
            tokens[cutoffs.greedy] = highest(x[cutoffs.greedy])
        return tokens

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
