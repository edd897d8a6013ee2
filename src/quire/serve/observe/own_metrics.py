"""Quire's own metrics, whose names begin with `quire:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quire import __version__
from quire.serve.observe.metric_builder import MetricBuilder
from quire.serve.replicas.replica import Replica
from quire.types import TransferKind


class OwnMetrics(MetricBuilder):
    """All families of Quire with their current values, in the order of export."""

    def __iter__(self) -> Iterator[Metric]:
        yield from self._memory()
        yield from self._engines()
        yield from self._queue()
        yield from self._clients()
        yield from self._steps()

    def _memory(self) -> Iterator[Metric]:
        yield self.engine_by_label(
            GaugeMetricFamily,
            "quire:blocks",
            "Number of KV cache blocks by state: used, cached (free, but reusable as a prefix) and blank.",
            "state",
            _blocks,
        )
        yield self.by_engine(
            CounterMetricFamily(
                "quire:block_evictions",
                "Number of cached blocks evicted to make room.",
                labels=list(self.base),
            ),
            lambda r: r.figures.evictions,
        )
        yield self.engine_by_label(
            CounterMetricFamily,
            "quire:kv_fetched_tokens",
            "Number of cached tokens whose blocks were not on the device, by the tier that they came from.",
            "tier",
            lambda r: {t: r.figures.totals.fetched_tokens.get(t, 0) for t in ("host", "disk", "prefill")},
        )
        yield self.engine_by_label(
            CounterMetricFamily,
            "quire:kv_moved_bytes",
            "Number of bytes of blocks copied to and from the device, by kind of transfer.",
            "kind",
            lambda r: {kind: r.figures.totals.moved_bytes.get(kind, 0) for kind in get_args(TransferKind)},
        )
        yield self.engine_counter(
            "quire:kv_unsaved_blocks",
            "Number of evicted blocks for which host memory had no free row.",
            lambda totals: totals.unsaved_blocks,
        )
        yield self.engine_by_label(
            GaugeMetricFamily,
            "quire:state_snapshots",
            "Number of rows for snapshots of states by state: named (found by the prefix cache) and other.",
            "state",
            _snapshots,
        )
        yield self.by_engine(
            CounterMetricFamily(
                "quire:state_snapshot_evictions",
                "Number of snapshots of states evicted to make room.",
                labels=list(self.base),
            ),
            lambda r: r.figures.snapshot_evictions,
        )

    def _engines(self) -> Iterator[Metric]:
        yield self.engine_counter(
            "quire:pressure_events",
            "Number of times that blocks ran out: preemptions, and admissions that had to wait.",
            lambda totals: totals.pressure,
        )
        yield self.engine_counter(
            "quire:requests_not_finite",
            "Number of requests aborted because the model's output was NaN or infinite.",
            lambda totals: totals.not_finite,
        )
        yield self.engine_gauge(
            "quire:replica_up", "1 for a replica that serves, 0 otherwise.", lambda r: r.health == "serving"
        )
        yield self.by_engine(
            CounterMetricFamily(
                "quire:replica_restarts",
                "Number of times that the process of a replica was replaced.",
                labels=list(self.base),
            ),
            lambda r: r.restarts,
        )

    def _queue(self) -> Iterator[Metric]:
        engine, account = self.engine, self.account
        yield self.gauge(
            "quire:requests_held",
            "Number of requests that wait in the API process for a replica with room.",
            engine.replicas.num_held,
        )
        yield self.counter(
            "quire:log_lines_dropped",
            "Number of log lines dropped because standard output or standard error was not read fast enough.",
            self.server.lines.dropped,
        )
        yield self.gauge(
            "quire:requests_open",
            "Number of unfinished choices (answers), waiting ones included.",
            engine.num_open,
        )
        yield self.counter(
            "quire:requests_completed",
            "Number of HTTP requests answered completely.",
            account.of(None).completed,
        )
        yield self.counters(
            "quire:queue_seconds",
            "Time in seconds that requests waited in the engine, by cause.",
            "cause",
            account.waited_s,
        )
        for name, text, value in (
            (
                "lost_to_prefills_seconds",
                "Time in seconds that decoding requests lost to the prefills of others.",
                account.lost_s,
            ),
            ("preempted_seconds", "Time in seconds that preempted requests waited.", account.preempted_s),
            (
                "recompute_seconds",
                "Time in seconds to recompute tokens after preemptions.",
                account.recompute_s,
            ),
            (
                "recomputed_tokens",
                "Number of tokens recomputed after preemptions.",
                account.recomputed_tokens,
            ),
        ):
            yield self.counter(f"quire:{name}", text, value)

    def _clients(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "quire:client_tokens",
            "Number of tokens in finished requests, by client and kind.",
            labels=[*self.base, "client", "kind"],
        )
        for name, client in self.account.clients.items():
            if self.viewer.sees in (None, name):
                for kind, count in (
                    ("prompt", client.prompt_tokens),
                    ("generation", client.generated_tokens),
                ):
                    family.add_metric([*self.base.values(), name, kind], count)
        yield family

    def _steps(self) -> Iterator[Metric]:
        engine, account = self.engine, self.account
        yield self.histogram("quire:step_seconds", "Histogram of step durations in seconds.", account.step_s)
        yield self.histogram("quire:step_rows", "Histogram of requests per step.", account.step_rows)
        phases = {name: float(seconds) for name, seconds in engine.info.phases_s.items()}
        yield self.gauges(
            "quire:start_up_seconds", "Start-up time of the engine in seconds, by phase.", "phase", phases
        )
        yield self.gauge("quire:build_info", "Version of Quire, as a label.", 1, {"version": __version__})


def _blocks(replica: Replica) -> dict[str, float]:
    figures, blocks = replica.figures, replica.info.num_blocks
    free = figures.free_blocks if figures.totals.steps else blocks
    return {"used": blocks - free, "cached": figures.cached_blocks, "blank": free - figures.cached_blocks}


def _snapshots(replica: Replica) -> dict[str, float]:
    named, rows = replica.figures.snapshots, replica.info.num_snapshots
    return {"named": named, "other": rows - named}
