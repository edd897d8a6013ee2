"""The all-reduce in two trips and the one with the norm: one rank runs, and the test plays its peers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels import sum_and_norm, two_trip
from quire.kernels.norm import add_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter truncates to bfloat16.
INTERPRETED = DEVICE.type == "cpu"


class Ranks:
    """The buffers of `size` ranks, in one memory."""

    def __init__(self, size: int, buffer_bytes: int, programs: int) -> None:
        self.size = size
        self.buffers = [torch.zeros(buffer_bytes // 8, dtype=torch.int64, device=DEVICE) for _ in range(size)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers], device=DEVICE)
        self.calls = torch.zeros(programs, dtype=torch.int32, device=DEVICE)


def words_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.int32).long() & 0xFFFFFFFF


def added(xs: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(xs[0].shape, device=DEVICE)
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_two_trips(dtype: torch.dtype, size: int, rank: int) -> None:
    torch.manual_seed(0)
    block, most = two_trip.BLOCK, two_trip.MAX_BLOCKS
    ranks = Ranks(size, two_trip.buffer_bytes(size), most)
    layout = (2, most, 2, size, block)
    shapes = [
        (3, 700),
        (1, 8),
        (5, 702),
        (2, 6),
        (2, 6),
    ]  # calls use fewer and more programs than those before
    for shape in shapes:
        xs = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(size)]
        total = added(xs)
        words = xs[0].nbytes // 4
        owned = -(-words // size)
        programs = -(-owned // block)

        def slices(x: torch.Tensor) -> torch.Tensor:
            """Return the words by owner, program and lane, zeros behind the last one."""
            padded = torch.zeros(size * owned, dtype=torch.int64, device=DEVICE)  # noqa: B023
            padded[:words] = words_of(x)  # noqa: B023
            out = torch.zeros(size, programs * block, dtype=torch.int64, device=DEVICE)  # noqa: B023
            out[:, :owned] = padded.view(size, owned)  # noqa: B023
            return out.view(size, programs, block)  # noqa: B023

        number = ranks.calls[:programs].long() + 1
        half, at = number % 2, torch.arange(programs, device=DEVICE)
        above = (number << 32)[:, None]
        mine = ranks.buffers[rank].view(layout)
        for source in range(size):
            if source != rank:
                mine[half, at, 0, source] = slices(xs[source])[rank] | above
                mine[half, at, 1, source] = slices(total)[source] | above
        out = two_trip.all_reduce(xs[rank], ranks.addresses, ranks.calls, rank, size)
        tolerance = 2**-7 if dtype == torch.bfloat16 and INTERPRETED else 0
        torch.testing.assert_close(out, total, rtol=tolerance, atol=0)
        for peer in range(size):
            if peer != rank:
                theirs = ranks.buffers[peer].view(layout)
                assert torch.equal(theirs[half, at, 0, rank], slices(xs[rank])[peer] | above)
                assert torch.equal(theirs[half, at, 1, rank], slices(out)[rank] | above)


def test_what_two_trips_take() -> None:
    most = 4 * two_trip.BLOCK * two_trip.MAX_BLOCKS  # bytes of a rank's slice
    for size in (2, 4):
        assert two_trip.takes(torch.empty(size * most // 2, dtype=torch.bfloat16), size)
        assert not two_trip.takes(torch.empty(size * most // 2 + 2, dtype=torch.bfloat16), size)
    assert not two_trip.takes(torch.empty(8, dtype=torch.int64), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (4, 3)])
@pytest.mark.parametrize("width", [64, 96])
def test_sum_and_norm(dtype: torch.dtype, size: int, rank: int, width: int) -> None:
    torch.manual_seed(1)
    most, longest = sum_and_norm.MAX_ROWS, sum_and_norm.MAX_WORDS
    ranks = Ranks(size, sum_and_norm.buffer_bytes(size), most)
    layout, words = (2, most, size, longest), width // 2
    weight = (1 + torch.randn(width, device=DEVICE) / 4).to(dtype)
    for rows in (3, 1, 4):
        xs = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(size)]
        residual = torch.randn(rows, width, device=DEVICE).to(dtype)
        number = ranks.calls[:rows].long() + 1
        half, at = number % 2, torch.arange(rows, device=DEVICE)
        above = (number << 32)[:, None]
        mine = ranks.buffers[rank].view(layout)
        for source in range(size):
            if source != rank:
                mine[half, at, source, :words] = words_of(xs[source]).view(rows, words) | above
        normed, total = sum_and_norm.all_reduce_add_norm(
            xs[rank], residual, weight, 1e-6, ranks.addresses, ranks.calls, rank, size
        )
        want_normed, want_total = add_rms_norm(added(xs), residual, weight, 1e-6)
        tolerance = 4 * torch.finfo(dtype).eps if INTERPRETED else torch.finfo(dtype).eps
        torch.testing.assert_close(total, want_total, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(normed, want_normed, rtol=tolerance, atol=4 * tolerance)
        for peer in range(size):
            if peer != rank:
                sent = ranks.buffers[peer].view(layout)[half, at, rank, :words]
                assert torch.equal(sent, words_of(xs[rank]).view(rows, words) | above)
    assert ranks.calls[:5].tolist() == [3, 2, 2, 1, 0]


def test_what_sum_and_norm_takes() -> None:
    assert sum_and_norm.takes(torch.empty(64, 8192, dtype=torch.bfloat16))
    assert not sum_and_norm.takes(torch.empty(65, 4096, dtype=torch.bfloat16))
    assert not sum_and_norm.takes(torch.empty(1, 8194, dtype=torch.bfloat16))
    assert not sum_and_norm.takes(torch.empty(1, 4096))
