"""The figures of an engine for its clients, read from the scheduler and the step log."""

from __future__ import annotations

from dataclasses import asdict

from quire.core.engine import Engine
from quire.core.lifecycle import Lifecycle
from quire.types import EngineLoad, EngineStats, Figures, StepFigures
from quire.types.request_table import CATCHING_UP, COMPUTED, KNOWN


def load_of(engine: Engine, received: int) -> EngineLoad:
    """Return the load, which accompanies every message of outputs.

    Args:
        engine: the engine to read.
        received: number of requests received since the start, refused ones included.
    """
    scheduler, rate = engine.scheduler, engine.scheduler.prompts.rate
    return EngineLoad(
        received=received,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.tokens,
        uncached_tokens=scheduler.waiting.uncached_tokens,
        computing_tokens=_computing_tokens(scheduler.life) if rate else 0,
        prompt_rate=rate,
    )


def _computing_tokens(life: Lifecycle) -> int:
    """Return the tokens that running requests lack until they decode."""
    cells = life.table.data.take(life.running.rows, axis=1)
    return int(((cells[KNOWN] - cells[COMPUTED]) * cells[CATCHING_UP]).sum())


def figures_of(engine: Engine, since: int) -> Figures:
    """Return the figures that accompany every message of outputs.

    Args:
        engine: the engine to read.
        since: number of the first step to report; earlier messages have reported those before it.
    """
    scheduler, log, clocks = engine.scheduler, engine.log, engine.scheduler.clocks
    return Figures(
        time_s=clocks.ended_s,
        lost_s=clocks.lost_s,
        free_blocks=scheduler.pool.num_free,
        cached_blocks=scheduler.pool.num_cached,
        held=clocks.held,
        evictions=scheduler.pool.evictions,
        snapshots=scheduler.blocks.snapshots.num_named,
        snapshot_evictions=scheduler.blocks.snapshots.evictions,
        wait_reason=log.last.wait_reason if len(log) and scheduler.waiting else None,
        totals=log.totals,
        notes=list(scheduler.connector.notes),
        steps=[StepFigures(len(r.rows), r.num_tokens, r.took_s) for r in log.ended_since(since)],
    )


def _load_by_owner(engine: Engine, received: int, owner: str | None) -> tuple[EngineLoad, EngineLoad]:
    """Return the load by requests of the client `owner` (None: of all clients) and the load by all others."""
    everything, own = load_of(engine, received), EngineLoad(received)
    if owner is None:
        return everything, own
    waiting = [r for r in engine.scheduler.waiting if r.source.client == owner]
    own.running = sum(r.source.client == owner for r in engine.scheduler.running)
    own.waiting, own.waiting_tokens = len(waiting), sum(r.prompt_len for r in waiting)
    return own, EngineLoad(
        received,
        everything.running - own.running,
        everything.waiting - own.waiting,
        everything.waiting_tokens - own.waiting_tokens,
    )


def stats_of(engine: Engine, received: int, owner: str | None = None) -> EngineStats:
    """Return the figures that /stats shows.

    Args:
        engine: the engine to read.
        received: number of requests received since the start, refused ones included.
        owner: the client whose requests `EngineStats.load` counts; None counts those of all clients.
    """
    scheduler, log = engine.scheduler, engine.log
    load, others = _load_by_owner(engine, received, owner)
    served = scheduler.shares.served
    last: dict[str, float] = {}
    if len(log):
        record = log.last
        last = {
            "step": record.step,
            "rows": len(record.rows),
            "tokens": record.num_tokens,
            "schedule_s": record.schedule_s,
            "launch_s": record.launch_s,
            "wait_s": record.wait_s,
            "retire_s": record.retire_s,
        }
    return EngineStats(
        load=load,
        others=others,
        wait_reason=log.last.wait_reason if len(log) and scheduler.waiting else None,
        blocks=scheduler.pool.num_blocks,
        free_blocks=scheduler.pool.num_free,
        cached_blocks=scheduler.pool.num_cached,
        block_size=scheduler.limits.block_size,
        totals={
            **asdict(log.totals),
            "evictions": scheduler.pool.evictions,
            "snapshot_evictions": scheduler.blocks.snapshots.evictions,
        },
        last_step=last,
        served_tokens=dict(served) if owner is None else {owner: served.get(owner, 0)},
        snapshot_rows=scheduler.blocks.snapshots.num_rows,
        snapshots=scheduler.blocks.snapshots.num_named,
    )
