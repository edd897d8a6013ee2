"""Logits processors: one class per feature that edits logits, with its own slot columns.

Each class records on the host which slots use it, and edits only their rows. It reads a request's tokens from the
device's token columns in every step. There are no running counts, so overlap, preemption and rejected draft tokens
need no special treatment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels import available
from quire.sampling.columns import LogitRows, SlotLists, SlotTable, TokenColumns, rows_where
from quire.types import EngineRequest

NEVER = float("-inf")
_PENALTIES = ("on", "repetition", "presence", "frequency")


class LogitsProcessor(Protocol):
    """One feature that edits logits, on behalf of the `SamplingParams` named in `fields`."""

    fields: ClassVar[tuple[str, ...]]

    def add(self, slot: int, request: EngineRequest) -> bool:
        """Stage the request's parameters for `slot` on the host, and return whether it uses the feature."""
        ...

    def flush(self) -> None:
        """Send the staged parameters to the device without waiting."""
        ...

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        """Change float32 `logits` [rows, vocab] in place."""
        ...


def all_processors(
    columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device
) -> list[LogitsProcessor]:
    """Create the logits processors, in the order in which they are applied."""
    return [
        AllowedTokens(vocab_size, num_slots, device),
        BadWords(columns, vocab_size, num_slots, device),
        MinTokens(columns, vocab_size, num_slots, device),
        LogitBias(vocab_size, num_slots, device),
        Penalties(columns, vocab_size, num_slots, device),
    ]


def _flat(logits: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a flat view of the logits, and the indices of the (row, token) pairs in it."""
    return logits.view(-1), rows * logits.shape[1] + tokens


class AllowedTokens:
    """`allowed_token_ids`: forbids every other token."""

    fields: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)

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

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        on = self._on[at.slots_host]
        if not on.any():
            return
        expanded = self._lists.expand(at.slots_host)
        restricted = rows_where(on, self._device)
        never = logits.new_full((), NEVER)  # created on the device: a Python number would be copied there
        if expanded is None:
            logits[restricted] = never
            return
        flat, index = _flat(logits, expanded[0], expanded[1][:, 0])
        allowed = flat[index]
        logits[restricted] = never
        flat[index] = allowed


class BadWords:
    """`bad_words`: forbids the last token of a word if the request's last tokens are the rest of the word.

    An entry is [last token, the one before, the one before that, ...]. A word of one token is always forbidden. The
    preceding tokens may be part of the prompt.
    """

    fields: ClassVar[tuple[str, ...]] = ("bad_words",)

    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)

    def add(self, slot: int, request: EngineRequest) -> bool:
        words = [w[::-1] for w in request.bad_words_ids if w and all(0 <= t < self._vocab_size for t in w)]
        return self._lists.put(slot, words)

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        expanded = self._lists.expand(at.slots_host)
        if expanded is None:
            return
        rows, words = expanded  # [e], [e, width]
        slot = at.slots[rows]
        before = words[:, 1:]  # [e, width - 1], newest first, -1 if the word is shorter
        back = torch.arange(1, words.shape[1], device=words.device)
        position = at.lengths[rows].long().unsqueeze(1) - back  # [e, width - 1]
        seen = self._columns.tokens[slot.unsqueeze(1), position.clamp(min=0)]
        matches = ((before < 0) | ((position >= 0) & (seen == before))).all(1)
        flat, index = _flat(logits, rows, words[:, 0])
        # Several words may end in the same token. With the minimum, the order of writes does not matter.
        flat.scatter_reduce_(0, index, torch.where(matches, NEVER, torch.inf), "amin")


class MinTokens:
    """`min_tokens`: forbids stop tokens until the output has that many tokens.

    With a grammar, the grammar's mask enforces it instead, because a complete answer must be able to end.
    """

    fields: ClassVar[tuple[str, ...]] = ("min_tokens",)

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

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        expanded = self._lists.expand(at.slots_host)
        if expanded is None:
            return
        rows, stops = expanded
        early = at.lengths[rows] - self._columns.prompt_len[at.slots[rows]] < stops[:, 1]
        flat, index = _flat(logits, rows, stops[:, 0])
        flat[index] = torch.where(early, NEVER, flat[index])


class LogitBias:
    """`logit_bias`: adds a constant to the logits of given tokens. An entry holds the bias as float64 bits."""

    fields: ClassVar[tuple[str, ...]] = ("logit_bias",)

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._lists = SlotLists(num_slots, device)

    def add(self, slot: int, request: EngineRequest) -> bool:
        bias = {t: b for t, b in (request.params.logit_bias or {}).items() if t < self._vocab_size}
        bits = np.array(list(bias.values()), dtype=np.float64).view(np.int64).tolist()
        return self._lists.put(slot, [[t, b] for t, b in zip(bias, bits)])

    def flush(self) -> None:
        self._lists.flush()

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        expanded = self._lists.expand(at.slots_host)
        if expanded is None:
            return
        rows, entries = expanded
        flat, index = _flat(logits, rows, entries[:, 0])
        flat[index] += entries[:, 1].contiguous().view(torch.float64).float()


class Penalties:
    """Repetition, presence and frequency penalties, computed from the token columns in every step.

    A GPU uses the kernel of kernels/sampling/penalties.py; `penalise_plain` is its reference.
    """

    fields: ClassVar[tuple[str, ...]] = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def __init__(self, columns: TokenColumns, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._columns = columns
        self._table = SlotTable(_PENALTIES, num_slots, device)
        self._repeats = np.zeros(num_slots, dtype=np.bool_)
        self._counts = np.zeros(num_slots, dtype=np.bool_)
        self._device = device
        self._penalise = self.kernel_form(vocab_size) if available(device) else self.penalise_plain

    def add(self, slot: int, request: EngineRequest) -> bool:
        params = request.params
        was_on = bool(self._repeats[slot] or self._counts[slot])
        self._repeats[slot] = params.repetition_penalty != 1.0
        self._counts[slot] = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        on = bool(self._repeats[slot] or self._counts[slot])
        if on or was_on:  # the kernel reads the column "on" on the device
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

    def apply(self, logits: Tensor, at: LogitRows) -> None:
        if (self._repeats[at.slots_host] | self._counts[at.slots_host]).any():
            self._penalise(logits, at)

    def kernel_form(self, vocab_size: int) -> Callable[[Tensor, LogitRows], None]:
        """Return `penalise_plain` as a kernel launch, with scratch memory allocated once."""
        from quire.kernels.sampling.penalties import COLUMNS, PROGRAMS, penalise

        assert COLUMNS == _PENALTIES
        table, columns = self._table.values, self._columns
        counts = torch.zeros(PROGRAMS, vocab_size, dtype=torch.int32, device=self._device)

        def launch(logits: Tensor, at: LogitRows) -> None:
            penalise(logits, at.slots, table, columns.tokens, at.lengths, columns.prompt_len, counts)

        return launch

    def penalise_plain(self, logits: Tensor, at: LogitRows) -> None:
        """Apply the penalties to `logits` float32 [rows, vocab] in place, in plain PyTorch."""
        repeats, counts = self._repeats[at.slots_host], self._counts[at.slots_host]
        rows = rows_where(repeats | counts, self._device)
        slot = at.slots[rows]
        amounts = self._table.gather(slot)
        x = logits[rows]  # [r, vocab]
        tokens, known, output = self._read(slot, at.lengths[rows], x.shape[1])
        if repeats.any():
            seen = torch.zeros_like(x, dtype=torch.int32).scatter_add_(1, tokens, known) > 0
            by = amounts.float32("repetition").unsqueeze(1)
            x = torch.where(seen, torch.where(x > 0, x / by, x * by), x)
        if counts.any():
            count = torch.zeros_like(x).scatter_add_(1, tokens, output.float())
            x = x - amounts.float32("frequency").unsqueeze(1) * count
            x = x - amounts.float32("presence").unsqueeze(1) * (count > 0)
        logits[rows] = x

    def _read(self, slot: Tensor, length: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids int64 [r, L], and int32 flags: is a known token, is a known output token.

        Positions past the end count as 0. They are spread over many token ids, because adding all of them to the
        same element would serialise the device.
        """
        position = torch.arange(self._columns.tokens.shape[1], device=slot.device)  # [L]
        known = position < length.unsqueeze(1)  # [r, L]
        output = known & (position >= self._columns.prompt_len[slot].unsqueeze(1))
        tokens = torch.where(known, self._columns.tokens[slot].clamp(0, vocab - 1).long(), position % vocab)
        return tokens, known.to(torch.int32), output.to(torch.int32)
