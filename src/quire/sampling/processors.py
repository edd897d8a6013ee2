"""Changes to the logits that a request asks for: one class per feature, with its own slot columns.

Each class remembers on the host which slots use it, and touches only rows of those. What it needs to
know of a request's tokens it reads from the device's token columns in every step: nothing is counted
up along the way, so overlap, preemption and rejected drafts need no care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels import available
from quire.sampling.columns import SlotLists, SlotTable, TokenColumns, rows_where
from quire.types import EngineRequest

NEVER = float("-inf")
_PENALTIES = ("on", "repetition", "presence", "frequency")


class LogitsProcessor(Protocol):
    """One feature that edits logits, on behalf of the `SamplingParams` named in `fields`."""

    fields: ClassVar[tuple[str, ...]]

    def add(self, slot: int, request: EngineRequest) -> bool:
        """Stage the request's parameters on the host; True if it uses the feature."""
        ...

    def flush(self) -> None:
        """Send what is staged to the device, without waiting."""
        ...

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        """Edit float32 `logits` [rows, vocab] in place."""
        ...


def all_processors(
    columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device
) -> list[LogitsProcessor]:
    """In the order in which they apply."""
    return [
        AllowedTokens(vocab_size, num_slots, device),
        BadWords(columns, vocab_size, num_slots, device),
        MinTokens(columns, vocab_size, num_slots, device),
        LogitBias(vocab_size, num_slots, device),
        Penalties(columns, vocab_size, num_slots, device),
    ]


def _flat(logits: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits as one long vector, and where the (row, token) pairs lie in it."""
    return logits.view(-1), rows * logits.shape[1] + tokens


class AllowedTokens:
    """allowed_token_ids: every other token is out."""

    fields = ("allowed_token_ids",)

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)
        self._on = np.zeros(num_slots, dtype=np.bool_)
        self._device = device

    def add(self, slot: int, request: EngineRequest) -> bool:
        allowed = request.params.allowed_token_ids
        self._lists.put(slot, [[t] for t in allowed or () if t < self._vocab_size])
        self._on[slot] = allowed is not None
        return allowed is not None

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        on = self._on[slots_host]
        if not on.any():
            return
        expanded = self._lists.expand(slots_host)
        restricted = rows_where(on, self._device)
        never = logits.new_full((), NEVER)  # made on the device: a Python number would be copied there
        if expanded is None:
            logits[restricted] = never
            return
        flat, index = _flat(logits, expanded[0], expanded[1][:, 0])
        kept = flat[index]
        logits[restricted] = never
        flat[index] = kept


class BadWords:
    """Forbids the last token of an n-gram wherever the tokens before it have just occurred.

    An entry is [last token, the one before, the one before that, ...]. A word of one token is always
    out. The tokens before may lie in the prompt.
    """

    fields = ("bad_words",)

    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)

    def add(self, slot: int, request: EngineRequest) -> bool:
        words = [w[::-1] for w in request.bad_words_ids if w and all(0 <= t < self._vocab_size for t in w)]
        return self._lists.put(slot, words)

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        expanded = self._lists.expand(slots_host)
        if expanded is None:
            return
        rows, words = expanded  # [e], [e, width]
        slot = slots[rows]
        before = words[:, 1:]  # [e, width - 1], newest first, -1 where the word is shorter
        back = torch.arange(1, words.shape[1], device=words.device)
        position = self._columns.num_tokens[slot].long().unsqueeze(1) - back  # [e, width - 1]
        seen = self._columns.tokens[slot.unsqueeze(1), position.clamp(min=0)]
        matches = ((before < 0) | ((position >= 0) & (seen == before))).all(1)
        flat, index = _flat(logits, rows, words[:, 0])
        # Several words may end in the same token: the minimum makes the order of writes irrelevant.
        flat.scatter_reduce_(0, index, torch.where(matches, NEVER, torch.inf), "amin")


class MinTokens:
    """min_tokens: no stop token before the output has that many tokens. With a grammar it is the grammar's mask
    that sees to it, because a complete answer must be able to end."""

    fields = ("min_tokens",)

    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)

    def add(self, slot: int, request: EngineRequest) -> bool:
        least = 0 if request.grammar else request.params.min_tokens
        stops = {*request.stop_ids, *request.eos_ids, *request.params.stop_token_ids} if least > 0 else set()
        return self._lists.put(slot, [[t, least] for t in sorted(stops) if 0 <= t < self._vocab_size])

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        expanded = self._lists.expand(slots_host)
        if expanded is None:
            return
        rows, stops = expanded
        slot = slots[rows]
        early = self._columns.num_tokens[slot] - self._columns.prompt_len[slot] < stops[:, 1]
        flat, index = _flat(logits, rows, stops[:, 0])
        flat[index] = torch.where(early, NEVER, flat[index])


class LogitBias:
    """logit_bias: a constant added to the logits of given tokens. The bias travels as float64 bits."""

    fields = ("logit_bias",)

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)

    def add(self, slot: int, request: EngineRequest) -> bool:
        bias = {t: b for t, b in (request.params.logit_bias or {}).items() if t < self._vocab_size}
        bits = np.array(list(bias.values()), dtype=np.float64).view(np.int64).tolist()
        return self._lists.put(slot, [[t, b] for t, b in zip(bias, bits)])

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        expanded = self._lists.expand(slots_host)
        if expanded is None:
            return
        rows, entries = expanded
        flat, index = _flat(logits, rows, entries[:, 0])
        flat[index] += entries[:, 1].contiguous().view(torch.float64).float()


class Penalties:
    """Repetition, presence and frequency penalty, counted afresh from the token columns.

    On a GPU by the kernel of kernels/sampling/penalties.py; `penalise_plain` says what it must do.
    """

    fields = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._table = SlotTable(_PENALTIES, num_slots, device)
        self._repeats = np.zeros(num_slots, dtype=np.bool_)
        self._counts = np.zeros(num_slots, dtype=np.bool_)
        self._device = device
        self._penalise = self._with_kernel(vocab_size) if available(device) else self.penalise_plain

    def add(self, slot: int, request: EngineRequest) -> bool:
        params = request.params
        was_on = bool(self._repeats[slot] or self._counts[slot])
        self._repeats[slot] = params.repetition_penalty != 1.0
        self._counts[slot] = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        on = bool(self._repeats[slot] or self._counts[slot])
        if on or was_on:  # the kernel reads from the device whether a slot is on
            self._table.stage(
                slot,
                {
                    "on": int(on),
                    "repetition": float(params.repetition_penalty),
                    "presence": float(params.presence_penalty),
                    "frequency": float(params.frequency_penalty),
                },
            )
        return on

    def flush(self) -> None:
        self._table.flush()

    def apply(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        if (self._repeats[slots_host] | self._counts[slots_host]).any():
            self._penalise(logits, slots_host, slots)

    def _with_kernel(self, vocab_size: int) -> Callable[[Tensor, np.ndarray, Tensor], None]:
        from quire.kernels.sampling.penalties import COLUMNS, PROGRAMS, penalise

        assert COLUMNS == _PENALTIES
        table, columns = self._table.values, self._columns
        counts = torch.zeros(PROGRAMS, vocab_size, dtype=torch.int32, device=self._device)

        def penalised(logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
            penalise(logits, slots, table, columns.tokens, columns.num_tokens, columns.prompt_len, counts)

        return penalised

    def penalise_plain(self, logits: Tensor, slots_host: np.ndarray, slots: Tensor) -> None:
        repeats, counts = self._repeats[slots_host], self._counts[slots_host]
        rows = rows_where(repeats | counts, self._device)
        slot = slots[rows]
        amounts = self._table.gather(slot)
        x = logits[rows]  # [r, vocab]
        tokens, known, output = self._read(slot, x.shape[1])
        if repeats.any():
            seen = torch.zeros_like(x, dtype=torch.int32).scatter_add_(1, tokens, known) > 0
            by = amounts.float32("repetition").unsqueeze(1)
            x = torch.where(seen, torch.where(x > 0, x / by, x * by), x)
        if counts.any():
            count = torch.zeros_like(x).scatter_add_(1, tokens, output.float())
            x = x - amounts.float32("frequency").unsqueeze(1) * count
            x = x - amounts.float32("presence").unsqueeze(1) * (count > 0)
        logits[rows] = x

    def _read(self, slot: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids int64 [r, L], and 1 or 0 in int32: is known, is known output.

        Positions past the end count nothing; they point at many different tokens, because adding all
        of them to one place would serialise the device.
        """
        position = torch.arange(self._columns.tokens.shape[1], device=slot.device)  # [L]
        known = position < self._columns.num_tokens[slot].unsqueeze(1)  # [r, L]
        output = known & (position >= self._columns.prompt_len[slot].unsqueeze(1))
        tokens = torch.where(known, self._columns.tokens[slot].clamp(0, vocab - 1).long(), position % vocab)
        return tokens, known.to(torch.int32), output.to(torch.int32)
