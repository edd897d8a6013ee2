"""Figures of several replicas as if they were one engine. The sum over one replica is its own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import reduce
from typing import Any

from quire.types import EngineInfo, EngineLoad, EngineStats, Figures, Totals


def add_loads(loads: Iterable[EngineLoad]) -> EngineLoad:
    """Return the sum of loads."""
    found = EngineLoad()
    for load in loads:
        found.received += load.received
        found.running += load.running
        found.waiting += load.waiting
        found.waiting_tokens += load.waiting_tokens
        found.uncached_tokens += load.uncached_tokens
        found.computing_tokens += load.computing_tokens
        found.prompt_rate += load.prompt_rate
    return found


def _add_values(one: Any, other: Any) -> Any:
    """Return the sum of two counters, or of two lists or tables of counters place by place."""
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    if not isinstance(one, list):
        return one + other
    longest = max(len(one), len(other))
    return [sum(column) for column in zip(*(v + [0] * (longest - len(v)) for v in (one, other)))]


def add_totals(one: Totals, other: Totals) -> Totals:
    """Return the sum of counters."""
    return Totals(
        **{f.name: _add_values(getattr(one, f.name), getattr(other, f.name)) for f in fields(Totals)}
    )


def add_figures(figures: Figures, past: Figures) -> Figures:
    """Return `figures` with the counters of `past` added: those of an engine that has been replaced."""
    return replace(
        figures,
        evictions=figures.evictions + past.evictions,
        snapshot_evictions=figures.snapshot_evictions + past.snapshot_evictions,
        totals=add_totals(figures.totals, past.totals),
    )


def sum_figures(all_figures: Sequence[Figures], blocks: Sequence[int]) -> Figures:
    """Return the figures of all replicas together, without steps.

    Args:
        all_figures: those of each replica.
        blocks: number of blocks of each; all are free before its first step.
    """
    if len(all_figures) == 1:
        return all_figures[0]
    return Figures(
        time_s=max(f.time_s for f in all_figures),
        free_blocks=sum(f.free_blocks if f.time_s else count for f, count in zip(all_figures, blocks)),
        cached_blocks=sum(f.cached_blocks for f in all_figures),
        held=sum(f.held for f in all_figures),
        evictions=sum(f.evictions for f in all_figures),
        snapshots=sum(f.snapshots for f in all_figures),
        snapshot_evictions=sum(f.snapshot_evictions for f in all_figures),
        wait_reason=next((f.wait_reason for f in all_figures if f.wait_reason), None),
        notes=[note for f in all_figures for note in f.notes],
        totals=reduce(add_totals, (f.totals for f in all_figures)),
    )


def sum_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the description of all replicas together: the shortest context, and sums of slots, blocks and bytes."""
    first = infos[0]
    return replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        num_blocks=sum(info.num_blocks for info in infos),
        num_snapshots=sum(info.num_snapshots for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        draft_weight_bytes=sum(info.draft_weight_bytes for info in infos),
        reserved_bytes=sum(info.reserved_bytes for info in infos),
        phases_s={name: max(info.phases_s.get(name, 0.0) for info in infos) for name in first.phases_s},
    )


def totals_of(figures: Figures) -> dict[str, Any]:
    """Return counters in the form of `EngineStats.totals`."""
    return {
        **asdict(figures.totals),
        "evictions": figures.evictions,
        "snapshot_evictions": figures.snapshot_evictions,
    }


def sum_stats(all_stats: Sequence[EngineStats], past: Sequence[Mapping[str, Any]]) -> EngineStats:
    """Return the statistics of all replicas together.

    Args:
        all_stats: those of each replica that serves.
        past: counters to add, in the form of `EngineStats.totals`: those of engines that have ended.
    """
    first = max(all_stats, key=lambda stats: stats.load.running)
    served: Counter[str] = Counter()
    for stats in all_stats:
        served.update(stats.served_tokens)
    return EngineStats(
        load=add_loads(stats.load for stats in all_stats),
        others=add_loads(stats.others for stats in all_stats),
        wait_reason=next((stats.wait_reason for stats in all_stats if stats.wait_reason), None),
        blocks=sum(stats.blocks for stats in all_stats),
        free_blocks=sum(stats.free_blocks for stats in all_stats),
        cached_blocks=sum(stats.cached_blocks for stats in all_stats),
        block_size=first.block_size,
        totals=reduce(_add_mappings, [*(dict(stats.totals) for stats in all_stats), *map(dict, past)]),
        last_step=first.last_step,
        served_tokens=dict(served),
        snapshot_rows=sum(stats.snapshot_rows for stats in all_stats),
        snapshots=sum(stats.snapshots for stats in all_stats),
    )


def _add_mappings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _add_values(one[name], other[name]) for name in one}
