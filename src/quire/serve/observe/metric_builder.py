"""Metric families with the labels that all of Quire's metrics carry: the model, and the number of the replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from quire.serve.api.context import ServerContext
from quire.serve.http.auth import ApiClient
from quire.serve.observe.histogram import Histogram
from quire.serve.replicas.replica import Replica
from quire.types import Totals


class MetricBuilder:
    """What all metrics are built from, and one method for each kind of family.

    Args:
        server: the server whose figures are read.
        viewer: the caller; token counts by client include only clients that it may see.
    """

    def __init__(self, server: ServerContext, viewer: ApiClient) -> None:
        self.viewer = viewer
        self.server, self.engine = server, server.engine
        self.account = server.engine.account
        self.replicas = server.engine.replicas.replicas
        # Figures of requests are those of all engines together.
        self.base = {"model_name": server.names[0], "engine": "0" if len(self.replicas) == 1 else "all"}

    def gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        """Build a gauge with one value, and more labels."""
        labels = {**self.base, **(labels or {})}
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Build a gauge with a value for each value of `label`."""
        return self.by_label(GaugeMetricFamily(name, text, labels=[*self.base, label]), values)

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Build a counter with one value."""
        family = CounterMetricFamily(name, text, labels=list(self.base))
        family.add_metric(list(self.base.values()), value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Build a counter with a value for each value of `label`."""
        return self.by_label(CounterMetricFamily(name, text, labels=[*self.base, label]), values)

    def by_label(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
    ) -> Metric:
        """Add a value for each value of the last label to a family."""
        for key, value in values.items():
            family.add_metric([*self.base.values(), key], value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Build a histogram."""
        family = HistogramMetricFamily(name, text, labels=list(self.base))
        family.add_metric(list(self.base.values()), histogram.buckets(), histogram.sum)
        return family

    def engine_gauge(self, name: str, text: str, value: Callable[[Replica], float]) -> Metric:
        """Build a gauge with a value for each replica."""
        return self.by_engine(GaugeMetricFamily(name, text, labels=list(self.base)), value)

    def engine_counter(self, name: str, text: str, value: Callable[[Totals], float]) -> Metric:
        """Build a counter with a value for each replica, from its totals."""
        family = CounterMetricFamily(name, text, labels=list(self.base))
        return self.by_engine(family, lambda replica: value(replica.figures.totals))

    def by_engine(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[Replica], float]
    ) -> Metric:
        """Add a value for each replica to a family."""
        for replica in self.replicas:
            family.add_metric([self.base["model_name"], str(replica.number)], value(replica))
        return family

    def engine_by_label(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Callable[[Replica], Mapping[str, float]],
    ) -> Metric:
        """Build a family with a value for each replica and each value of `label`."""
        found = family(name, text, labels=[*self.base, label])
        for replica in self.replicas:
            for key, value in values(replica).items():
                found.add_metric([self.base["model_name"], str(replica.number), key], value)
        return found
