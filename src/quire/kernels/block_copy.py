"""Copies of whole blocks between two KV caches, given by addresses, in one launch for all tensors.

The source may belong to another process, which has exported its memory, so it is an address and not a tensor.
"""

from __future__ import annotations

import torch
import triton.language as tl

from quire.kernels.jit import kernel

_WORDS = 2048  # that a program moves at once: 16 KiB
# Programs of a launch. More of them would take multiprocessors from the steps that run meanwhile.
PROGRAMS = 32


# Not specialized: the alignment of a row of a table depends on how many blocks a copy has.
@kernel(
    do_not_specialize=["sources", "targets", "words", "source_blocks", "target_blocks", "count", "tensors"]
)
def _copy_blocks(
    sources, targets, words, source_blocks, target_blocks, count, tensors, WORD: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, TILE)
    for item in range(tl.program_id(0), count * tensors, tl.num_programs(0)):
        tensor, index = item % tensors, item // tensors
        size = tl.load(words + tensor)
        source = tl.load(sources + tensor).to(tl.pointer_type(WORD)) + tl.load(source_blocks + index) * size
        target = tl.load(targets + tensor).to(tl.pointer_type(WORD)) + tl.load(target_blocks + index) * size
        for begin in range(0, size, TILE):
            inside = begin + lane < size
            values = tl.load(source + begin + lane, mask=inside)
            tl.store(target + begin + lane, values, mask=inside)


class BlockCopy:
    """Copies of blocks from tensors at `sources` to tensors at `targets`.

    Args:
        device: the GPU that copies.
        sources: address of each tensor to read.
        targets: address of each tensor to write.
        sizes: bytes of a block in each tensor.
        programs: programs of a launch.
    """

    def __init__(
        self,
        device: torch.device,
        sources: list[int],
        targets: list[int],
        sizes: list[int],
        programs: int = PROGRAMS,
    ) -> None:
        wide = all(number % 8 == 0 for number in (*sources, *targets, *sizes))
        self._word, size = (tl.int64, 8) if wide else (tl.uint8, 1)
        table = [sources, targets, [one // size for one in sizes]]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._programs = programs
        self(torch.empty(2, 0, dtype=torch.int64, device=device))  # compile now, not when a request waits

    def __call__(self, blocks: torch.Tensor) -> None:
        """Copy block blocks[0, i] of the source to block blocks[1, i] of the target; int64 [2, count]."""
        sources, targets, words = self._table
        _copy_blocks[(self._programs,)](
            sources, targets, words, blocks[0], blocks[1], blocks.shape[1], len(words), self._word, _WORDS, num_warps=8
        )  # fmt: skip
