"""The connector of a prefill engine: it shows computed blocks to a decode engine, and keeps them until they are read.

Blocks are shown chunk by chunk, when the step that computed them has been retired. So the decode engine may read them
at once. A request that has ended while its blocks are read is `holding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.blocks import Blocks
from quire.core.connector import NoConnector
from quire.core.plan_builder import ComputedRow
from quire.types import EngineOutput, ExportedBlocks, Request


@dataclass(slots=True)
class _Export:
    """The blocks of one request that have been shown, each with a reference."""

    upto: int = 0  # blocks of its prefix that have been shown
    held: list[int] = field(default_factory=list)


class BlockExporter(NoConnector):
    """The scheduler half of the connector of a prefill engine."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._exports: dict[str, _Export] = {}

    def retire(self, rows: Iterable[ComputedRow]) -> list[EngineOutput]:
        return [
            output for request, end in rows if request.source.exports for output in self._show(request, end)
        ]

    def _show(self, request: Request, end: int) -> list[EngineOutput]:
        """Show the full blocks of the first `end` tokens of a request."""
        export = self._exports.setdefault(request.id, _Export())
        full = min(end, request.prompt_len) // self._blocks.block_size
        if request.status != "running" or full <= export.upto:
            return []
        pieces = []
        # Of a group with a window only the last blocks are read. To keep others could take all blocks of the pool.
        size = self._blocks.block_size
        end_of_prompt = request.prompt_len // size * size
        for group, table in enumerate(request.tables):
            first_read = self._blocks.groups[group].first_block(end_of_prompt, size)
            first = max(export.upto, table.first, first_read)
            if blocks := table.blocks[first:full]:
                self._blocks.pool.share(blocks)
                export.held += blocks
                pieces.append(ExportedBlocks(group, first, blocks))
        export.upto = full
        return [EngineOutput(request.id, [], exported=pieces)]

    def finish(self, request: Request) -> bool:
        return bool(request.id in self._exports and self._exports[request.id].held)

    def release(self, request_id: str) -> None:
        if export := self._exports.pop(request_id, None):
            self._blocks.pool.release(export.held)

    def pinned(self) -> Iterable[list[int]]:
        return [export.held for export in self._exports.values()]
