"""The measurement of `quire bench memory`: how much of the KV cache each layout reserves, uses and wastes.

Requests have lengths of their own, as real ones do. A contiguous layout reserves the longest length for each; blocks
are reserved as tokens come. The figures are read from the pool of a running engine, step by step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quire.bench.drive import Bench
from quire.bench.load.workloads import MAX_RANDOM_ID, Workload
from quire.core.steplog import StepRecord
from quire.types import EngineInfo

LAYOUTS: tuple[Literal["contiguous", "paged"], ...] = ("contiguous", "paged")


@dataclass(frozen=True, slots=True)
class KVUse:
    """The use of the KV cache by requests that were sent at once. Bytes are means over the steps of the full batch."""

    layout: str
    batch_size: int
    held: int  # most requests that had blocks at once
    reserved_bytes: float
    used_bytes: float
    pool_bytes: int
    output_throughput: float  # tokens per second

    @property
    def wasted_bytes(self) -> float:
        """Bytes that were reserved and held no token."""
        return self.reserved_bytes - self.used_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return {**asdict(self), "wasted_bytes": self.wasted_bytes}


def measure_kv_use(
    bench: Bench, batch_sizes: Sequence[int], input_len: int, output_len: int
) -> Iterator[KVUse]:
    """Measure ascending batch sizes, up to the first that does not fit at once.

    Args:
        bench: the engine, whose prefix cache should be off: shared blocks would count once.
        batch_sizes: requests that are sent at once.
        input_len: longest prompt; the shortest has one token.
        output_len: longest answer.
    """
    info, layout = bench.info, str(bench.config.kv_layout)
    for size in batch_sizes:
        work = _load(size, input_len, output_len, info.vocab_size)
        run = bench.run(work, {"temperature": 0.0})
        held = max(record.running for record in run.steps)
        # Every request of these steps has blocks and a row, so the rows tell how many tokens are stored.
        full = [one for one in run.steps if one.running == held and len(one.rows) == held]
        reserved = statistics.fmean(info.num_blocks - one.free_blocks for one in full) * info.block_bytes
        used = statistics.fmean(_used_bytes(one, info) for one in full)
        yield KVUse(
            layout,
            size,
            held,
            reserved,
            used,
            info.num_blocks * info.block_bytes,
            sum(count for _, count in work) / run.duration_s,
        )
        if held < size:
            return


def _used_bytes(record: StepRecord, info: EngineInfo) -> float:
    """Return the bytes of the entries that the rows of a step read; a group with a window reads fewer."""
    lengths = [first + count for _, first, count in record.rows]
    entries = sum(min(length, window or length) for length in lengths for _, window in info.kv_groups)
    return entries * info.block_bytes / info.block_size


def _load(size: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """Return requests of random lengths, the same for every layout."""
    r = random.Random(size)
    ids = range(min(vocab_size, MAX_RANDOM_ID))
    return [(r.choices(ids, k=r.randint(1, input_len)), r.randint(1, output_len)) for _ in range(size)]
