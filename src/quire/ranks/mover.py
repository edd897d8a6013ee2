"""The mover over all ranks: each copies its part of the blocks, and an order has ended when it has ended on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.ranks.group import RankGroup
from quire.ranks.messages import encode_transfer
from quire.types import BlockKey, BlockMover, TransferEnd, TransferOrder


@dataclass(slots=True)
class _OpenOrder:
    """An order that some ranks have not ended, and the copies that failed on any of the others."""

    ranks: int
    failed: set[int] = field(default_factory=set)


class GroupMover:
    """Mover of the ranks of `group` and of `local`, the first rank."""

    def __init__(self, local: BlockMover, group: RankGroup) -> None:
        self._local, self._group = local, group
        self._open: dict[int, _OpenOrder] = {}

    def start(self, orders: Sequence[TransferOrder]) -> None:
        self._open.update((order.ticket, _OpenOrder(self._group.size)) for order in orders)
        self._group.send(encode_transfer(orders, ()))
        self._local.start(orders)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._group.send(encode_transfer((), keys))
        self._local.drop(keys)

    def ended(self) -> list[TransferEnd]:
        ends = []
        others = [TransferEnd(end.ticket, end.failed) for end in self._group.ended_copies()]
        for ticket, failed in (*self._local.ended(), *others):
            order = self._open[ticket]
            order.ranks -= 1
            order.failed.update(failed)
            if not order.ranks:
                del self._open[ticket]
                ends.append(TransferEnd(ticket, sorted(order.failed)))
        return ends

    def wait(self, timeout_s: float) -> None:
        self._group.check()
        self._local.wait(timeout_s)

    def close(self) -> None:
        self._local.close()
