"""The all-reduce kernel of one rank, whose peers are played by the test, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.collective import BLOCK, MAX_BLOCKS, all_reduce, buffer_bytes, takes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_sends_its_words_and_adds_those_of_the_others(
    dtype: torch.dtype, size: int, rank: int
) -> None:
    torch.manual_seed(0)
    buffers = [torch.zeros(buffer_bytes(size) // 8, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    addresses = torch.tensor([b.data_ptr() for b in buffers], device=DEVICE)
    calls = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    for shape in [(3, 700), (1, 8), (5, 701 + 1), (2, 3 * 2)]:  # later calls use fewer and more programs
        xs = [torch.randn(shape, dtype=dtype, device=DEVICE) for _ in range(size)]
        at = torch.arange(xs[0].nbytes // 4, device=DEVICE)
        block, lane = at // BLOCK, at % BLOCK
        number = calls[block].long() + 1
        place = ((number % 2 * MAX_BLOCKS + block) * size) * BLOCK + lane

        def packed(source: int) -> torch.Tensor:
            return (xs[source].view(-1).view(torch.int32).long() & 0xFFFFFFFF) | (number << 32)  # noqa: B023

        for source in range(size):
            if source != rank:
                buffers[rank][place + source * BLOCK] = packed(source)
        out = all_reduce(xs[rank], addresses, calls, rank, size)
        total = torch.zeros(shape, device=DEVICE)
        for x in xs:
            total += x.float()
        # Triton's interpreter truncates to bfloat16.
        tolerance = 2**-7 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0
        torch.testing.assert_close(out, total.to(dtype), rtol=tolerance, atol=0)
        for peer in range(size):
            if peer != rank:
                assert torch.equal(buffers[peer][place + rank * BLOCK], packed(rank))


def test_what_the_kernel_takes() -> None:
    assert takes(torch.empty(1, 4096, dtype=torch.bfloat16))
    assert not takes(torch.empty(0, 4096)) and not takes(torch.empty(1, 1, dtype=torch.float16))
    assert not takes(torch.empty(1 << 20)) and not takes(torch.empty(8, dtype=torch.int64))
