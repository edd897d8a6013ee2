"""Repetition, presence and frequency penalty in one launch, in time proportional to the tokens of a row.

A program counts the tokens of its row in a scratch line as long as the vocabulary, then visits them a second time. The
lane that exchanges a token's count for 0 penalises that token. So each token is penalised exactly once, with its full
count, in any order of execution, and the line is all zeros again for the next row.
"""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.jit import kernel
from quire.kernels.sampling.row import SAME_BITS

COLUMNS = ("on", "repetition", "presence", "frequency")
PROGRAMS = 32  # scratch lines; each program takes several rows in turn
_BLOCK = 1024
_WIDTH = tl.constexpr(len(COLUMNS))
_ON = tl.constexpr(COLUMNS.index("on"))
_REPETITION = tl.constexpr(COLUMNS.index("repetition"))
_PRESENCE = tl.constexpr(COLUMNS.index("presence"))
_FREQUENCY = tl.constexpr(COLUMNS.index("frequency"))
_IN_PROMPT = tl.constexpr(1 << 30)  # flag of a prompt token, added to its count in the output


@kernel
def _penalise(
    logits,  # float32 [rows, vocab]
    vocab,
    rows,
    slots,  # [rows]
    table,  # int64 [slots, COLUMNS]: 0 or 1, then float64
    tokens,  # int32 [slots, length]
    length,
    lengths,  # int32 [rows]
    prompt_len,  # int32 [slots]
    counts,  # int32 [programs, vocab], zero
    BLOCK: tl.constexpr,
) -> None:
    counts += tl.program_id(0).to(tl.int64) * vocab
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        slot = tl.load(slots + row).to(tl.int64)
        at = table + slot * _WIDTH
        if tl.load(at + _ON) != 0:
            repetition = tl.load(at + _REPETITION).to(tl.float64, bitcast=True).to(tl.float32)
            presence = tl.load(at + _PRESENCE).to(tl.float64, bitcast=True).to(tl.float32)
            frequency = tl.load(at + _FREQUENCY).to(tl.float64, bitcast=True).to(tl.float32)
            known, prompt = tl.load(lengths + row), tl.load(prompt_len + slot)
            own, line = tokens + slot * length, logits + tl.cast(row, tl.int64) * vocab

            for begin in range(0, known, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                token = tl.load(own + i, mask=i < known, other=0)
                place = counts + tl.minimum(tl.maximum(token, 0), vocab - 1)
                in_output = (i >= prompt) & (i < known)
                tl.atomic_add(place, tl.full([BLOCK], 1, tl.int32), mask=in_output)
                flag = tl.full([BLOCK], _IN_PROMPT, tl.int32)
                tl.atomic_or(place, flag, mask=(i < prompt) & (i < known))
            tl.debug_barrier()
            for begin in range(0, known, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                token = tl.load(own + i, mask=i < known, other=0)
                token = tl.minimum(tl.maximum(token, 0), vocab - 1)
                count = tl.atomic_xchg(counts + token, tl.zeros([BLOCK], tl.int32), mask=i < known)
                count = tl.where(i < known, count, 0)
                x = tl.load(line + token, mask=count != 0, other=0.0)
                x = tl.where(x > 0, tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + repetition), x * repetition)
                said = (count & (_IN_PROMPT - 1)).to(tl.float32)
                x -= frequency * said
                x -= tl.where(said > 0, presence, 0.0)
                tl.store(line + token, x, mask=count != 0)
            tl.debug_barrier()


def penalise(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    prompt_len: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Apply the penalties of each row's slot to its logits, in place.

    Args:
        logits: float32 [rows, vocab], contiguous.
        slots: [rows].
        table: int64 [slots, COLUMNS], the penalties of each slot; floats as the bits of a float64.
        tokens: int32 [slots, length], prompt and output of each slot.
        lengths: int32 [rows], the number of tokens that count, draft tokens included.
        prompt_len: int32 [slots], how many of them are the prompt.
        counts: int32 [programs, vocab], scratch memory of zeros; zero again afterwards.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and table.shape[1] == len(COLUMNS) and counts.shape[1] == vocab
    _penalise[(min(rows, counts.shape[0]),)](
        logits, vocab, rows, slots, table, tokens, tokens.stride(0), lengths, prompt_len, counts,
        BLOCK=_BLOCK, num_warps=8, **SAME_BITS,
    )  # fmt: skip
