"""The sampler: logits of a batch to one token per row, for any mix of sampling parameters.

Owns the sampling columns of every slot. Order, as in vLLM: log-probabilities of the raw logits; grammar
mask; allowed ids, bad words, min tokens, bias, penalties; temperature; min_p, top_k, top_p; draw.
Which of these a step needs is read from host columns, so unused features cost nothing. No call waits
for the device, and a row's token depends on that row alone. Rows without filters are chosen by the
kernel of kernels/sampling.py where it runs.
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
from quire.sampling.columns import Gathered, SlotTable, TokenColumns, rows_where, to_device
from quire.sampling.filters import FilterFlags, cutoffs
from quire.sampling.logprobs import Logprobs, score
from quire.sampling.noise import gumbel, row_keys
from quire.sampling.processors import all_processors
from quire.types import EngineRequest, TokenMasks

_COLUMNS = ("temperature", "top_k", "top_p", "log_min_p", "seed_low", "seed_high")
_GREEDY = 0.0  # as a temperature
_NONE = -1  # no log-probabilities wanted


Choose = Callable[[Tensor, np.ndarray, Tensor], Tensor]  # logits, slots on the host and device -> tokens


@dataclass(slots=True)
class SampleOutput:
    """Device tensors of one step. `logprobs` rows that did not ask for any hold zeros."""

    tokens: Tensor  # int32 [n]
    logprobs: Logprobs | None


class Sampler:
    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._table = SlotTable(_COLUMNS, num_slots, device)
        self._processors = all_processors(columns, vocab_size, num_slots, device)
        self._device = device
        self._vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        # What each slot uses, on the host.
        self._greedy = np.ones(num_slots, dtype=np.bool_)
        self._processed = np.zeros(num_slots, dtype=np.bool_)
        self._logprobs = np.full(num_slots, _NONE, dtype=np.int64)
        self._filters = FilterFlags.empty(num_slots)
        self._masked = np.zeros(num_slots, dtype=np.bool_)
        self._choose: Choose = self._with_kernel() if available(device) else self._plain
        self._apply_masks = _masks_kernel() if available(device) else plain_masks.apply_masks

    def admit(self, slot: int, request: EngineRequest) -> None:
        """Stage the parameters of the request that takes `slot`, on the host."""
        params = request.params
        self._greedy[slot] = params.greedy
        used = [processor.add(slot, request) for processor in self._processors]
        self._processed[slot] = any(used)
        self._logprobs[slot] = _NONE if params.logprobs is None else params.logprobs
        self._filters.top_k[slot] = max(0, params.top_k)
        self._filters.top_p[slot] = params.top_p < 1
        self._filters.min_p[slot] = params.min_p > 0
        self._masked[slot] = request.grammar is not None
        low, high = (int(half) for half in np.array([request.seed], dtype=np.int64).view(np.int32))
        self._table.stage(
            slot,
            {
                "temperature": _GREEDY if params.greedy else float(params.temperature),
                "top_k": max(0, params.top_k),
                "top_p": float(params.top_p),
                "log_min_p": math.log(params.min_p) if params.min_p > 0 else -math.inf,
                "seed_low": low,
                "seed_high": high,
            },
        )

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
        tokens = self._choose(x, slots_host, slots)
        return SampleOutput(tokens.to(torch.int32), self._score(logits, tokens, slots_host))

    def needs_host(self, slots_host: np.ndarray) -> bool:
        """Whether any row wants what `choose` does not do."""
        host = self._processed[slots_host] | (self._logprobs[slots_host] != _NONE)
        host |= ~self._greedy[slots_host] & self._filters.at(slots_host).used
        host |= self._masked[slots_host]
        return bool(host.any())

    def choose(self, logits: Tensor, slots: Tensor) -> Tensor:
        """int32 [rows], from device columns alone, so that it can be part of a CUDA graph. Needs the kernels."""
        from quire.kernels.sampling import choose

        temperature = self._table.float64("temperature")
        low, high = self._table.int64("seed_low"), self._table.int64("seed_high")
        return choose(logits, slots, temperature, low, high, self._columns.num_tokens)

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> Logprobs:
        """Log-probabilities of the given tokens int64 [m] under `logits` [m, vocab], and the top k."""
        return score(logits, targets, k)

    def _with_kernel(self) -> Choose:
        """Rows with filters are drawn by `_draw`, all others by the kernel: which of the two a row gets
        does not depend on its batch, so neither does its token."""
        from quire.kernels.sampling import choose

        temperature = self._table.float64("temperature")
        low, high = self._table.int64("seed_low"), self._table.int64("seed_high")

        def chosen(x: Tensor, slots_host: np.ndarray, slots: Tensor) -> Tensor:
            filtered = ~self._greedy[slots_host] & self._filters.at(slots_host).used
            if filtered.all():
                return self._draw(x, slots_host, slots)
            tokens = choose(x, slots, temperature, low, high, self._columns.num_tokens)
            if filtered.any():
                rows = rows_where(filtered, self._device)
                tokens[rows] = self._draw(x[rows], slots_host[filtered], slots[rows]).int()
            return tokens

        return chosen

    def _plain(self, x: Tensor, slots_host: np.ndarray, slots: Tensor) -> Tensor:
        """int64 [n]: the greedy choice of every row, overwritten by a draw where one is wanted."""
        drawn = ~self._greedy[slots_host]
        if drawn.all():
            return self._draw(x, slots_host, slots)
        if self._device.type == "cpu":
            x = x.float()  # argmax over bfloat16 is several times slower there than the conversion
        tokens = x.argmax(1)
        if drawn.any():
            rows = rows_where(drawn, self._device)
            tokens[rows] = self._draw(x[rows], slots_host[drawn], slots[rows])
        return tokens

    def _draw(self, x: Tensor, slots_host: np.ndarray, slots: Tensor) -> Tensor:
        """Gumbel-max over the tokens that the filters keep: argmax of logit / temperature + noise."""
        columns = self._table.gather(slots)
        x = x.to(torch.float32, copy=True).div_(columns.float32("temperature").unsqueeze(1))  # [r, vocab]
        x.nan_to_num_(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
        k0, k1 = self._keys(columns, slots)
        flags = self._filters.at(slots_host)
        if not flags.any:
            return x.add_(gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)).argmax(1)
        keep = x >= cutoffs(x, flags, columns)
        if self._device.type == "cpu":  # counting what is kept costs no wait here
            return _argmax_of_kept(x, keep, k0, k1)
        x += gumbel(k0.unsqueeze(1), k1.unsqueeze(1), self._vocab_ids)
        return x.masked_fill_(~keep, -math.inf).argmax(1)

    def _keys(self, columns: Gathered, slots: Tensor) -> tuple[Tensor, Tensor]:
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
    from quire.kernels.masks import apply_masks

    return apply_masks


def _argmax_of_kept(x: Tensor, keep: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """The same draw with noise for the kept tokens only; their number is read, so for the CPU."""
    row, token = keep.nonzero(as_tuple=True)
    noisy = x[row, token] + gumbel(k0[row], k1[row], token.to(torch.int32))
    best = torch.full_like(x[:, 0], -math.inf).scatter_reduce_(0, row, noisy, "amax")  # [r]
    vocab = x.shape[1]
    first = torch.where(noisy == best[row], token, vocab)
    # Of equals the lowest token, as argmax does; token 0 where nothing is kept.
    return torch.full_like(best, vocab, dtype=torch.int64).scatter_reduce_(0, row, first, "amin") % vocab
