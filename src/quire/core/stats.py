"""An engine's figures for its clients: read from the scheduler and the step log, owned by neither."""

from __future__ import annotations

from dataclasses import asdict

from quire.core.engine import Engine
from quire.types import EngineStats, Figures, Load


def load_of(engine: Engine, received: int) -> Load:
    """Counts that cost nothing to read: sent along with every message of outputs. `received`: requests
    that came in since the start, refused ones included."""
    scheduler = engine.scheduler
    return Load(
        received=received,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.tokens,
    )


def figures_of(engine: Engine, told: int) -> Figures:
    """What goes along with every message of outputs. `told`: the step after the last one that `steps` of an
    earlier message held."""
    scheduler, log, clocks = engine.scheduler, engine.log, engine.scheduler.clocks
    return Figures(
        time_s=clocks.ended_s,
        lost_s=clocks.lost_s,
        free_pages=scheduler.pool.num_free,
        cached_pages=scheduler.pool.num_cached,
        held=clocks.held,
        evictions=scheduler.pool.evictions,
        wait_reason=log.last.wait_reason if len(log) and scheduler.waiting else None,
        totals=log.totals,
        steps=[(len(r.rows), sum(count for _, _, count in r.rows), r.took_s) for r in log.ended_since(told)],
    )


def stats_of(engine: Engine, received: int) -> EngineStats:
    """Everything that /stats shows of the engine."""
    scheduler, log = engine.scheduler, engine.log
    last: dict[str, float] = {}
    if len(log):
        record = log.last
        last = {
            "step": record.step,
            "rows": len(record.rows),
            "tokens": sum(count for _, _, count in record.rows),
            "schedule_s": record.schedule_s,
            "launch_s": record.launch_s,
            "wait_s": record.wait_s,
            "retire_s": record.retire_s,
        }
    return EngineStats(
        load=load_of(engine, received),
        wait_reason=log.last.wait_reason if len(log) and scheduler.waiting else None,
        pages=scheduler.pool.num_blocks,
        free_pages=scheduler.pool.num_free,
        cached_pages=scheduler.pool.num_cached,
        page_size=scheduler.limits.block_size,
        totals={**asdict(log.totals), "evictions": scheduler.pool.evictions},
        last_step=last,
        served_tokens=dict(scheduler.shares.served),
    )
