"""An engine's figures for its clients: read from the scheduler and the step log, owned by neither."""

from __future__ import annotations

from dataclasses import asdict

from quire.core.engine import Engine
from quire.types import EngineStats, Load


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
        served_tokens=dict(scheduler.waiting.served),
    )
