"""The kernel that copies blocks between two KV caches, by addresses."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.block_copy import BlockCopy

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(16, 128, 20_000), (3, 24, 17_001)], ids=["words", "bytes"])
@pytest.mark.parametrize("programs", [1, 2, 40])
def test_blocks_are_copied_and_no_others(device: str, sizes: tuple[int, ...], programs: int) -> None:
    theirs = [torch.randint(1, 255, (6, size), dtype=torch.uint8, device=device) for size in sizes]
    ours = [torch.zeros(9, size, dtype=torch.uint8, device=device) for size in sizes]
    addresses = ([tensor.data_ptr() for tensor in tensors] for tensors in (theirs, ours))
    copy = BlockCopy(torch.device(device), *addresses, [*sizes], programs=programs)
    assert not any(tensor.any() for tensor in ours)
    copy(torch.tensor([[5, 0, 2], [1, 8, 3]], device=device))
    for source, target in zip(theirs, ours):
        assert torch.equal(target[[1, 8, 3]], source[[5, 0, 2]]) and not target[[0, 2, 4, 5, 6, 7]].any()
