"""What Prometheus scrapes of each replica, beside the metrics of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.cluster.replica import Replica
from chairlift.cluster.router import RoutedEngine

LABELS = ("model_name", "replica")
Described = dict[str, tuple[str, Callable[[Replica], float]]]

GAUGES: Described = {
    "up": ("Whether it takes requests.", lambda replica: replica.takes_requests),
    "requests_unfinished": ("Sequences sent to it that have not ended.", lambda replica: replica.unfinished),
    "load_tokens": ("Tokens that they may still need, by which requests are routed.", lambda replica: replica.load),
    "requests_running": ("Sequences in its batch.", lambda replica: replica.stats().running),
    "requests_waiting": ("Sequences that wait there to be admitted.", lambda replica: replica.stats().waiting),
    "requests_swapped": ("Sequences whose KV cache is in its host memory.", lambda replica: replica.stats().swapped),
    "kv_cache_usage_perc": (
        "Share of its KV blocks in use; 1 is all of them.",
        lambda replica: replica.stats().kv_cache_usage,
    ),
}
COUNTERS: Described = {
    "requests": ("Sequences sent to it.", lambda replica: replica.requests),
    "restarts": ("How often it, or its engine, was lost and came back.", lambda replica: replica.restarts),
    "steps": ("Steps.", lambda replica: replica.sums.steps),
    "step_seconds": ("Seconds spent computing steps.", lambda replica: replica.sums.seconds),
    "step_rows": ("Token rows computed.", lambda replica: replica.sums.rows),
    "prefix_cache_queries": ("Tokens looked up in its prefix cache.", lambda replica: replica.sums.looked_up),
    "prefix_cache_hits": ("Tokens that it had.", lambda replica: replica.sums.cached),
    "num_preemptions": ("Sequences put aside to make room for others.", lambda replica: replica.sums.preempted),
}


class ReplicaCollector(Collector):
    """The state of each replica and the sums of its steps, read when they are scraped.

    A counter keeps its value when the replica is lost and comes back; it is gone with a replica that was scaled away.
    """

    def __init__(self, engine: RoutedEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics."""
        name = self._model_name
        engine = self._engine
        wanted = GaugeMetricFamily("chairlift:replicas_wanted", "Replicas that there should be.", labels=LABELS[:1])
        wanted.add_metric((name,), engine.target)
        retries = CounterMetricFamily(
            "chairlift:request_retries", "Sequences that were begun again on another replica.", labels=LABELS[:1]
        )
        retries.add_metric((name,), engine.retries)
        info = GaugeMetricFamily("chairlift:replica_info", "Where it is; always 1.", labels=(*LABELS, "node", "state"))
        for replica in engine.replicas:
            info.add_metric((name, str(replica.number), replica.node, replica.state), 1)
        return [wanted, retries, info, *self._gauges(), *self._counters()]

    def _gauges(self) -> Iterable[Metric]:
        for suffix, (text, read) in GAUGES.items():
            family = GaugeMetricFamily(f"chairlift:replica_{suffix}", text, labels=LABELS)
            for replica in self._engine.replicas:
                family.add_metric((self._model_name, str(replica.number)), read(replica))
            yield family

    def _counters(self) -> Iterable[Metric]:
        for suffix, (text, read) in COUNTERS.items():
            family = CounterMetricFamily(f"chairlift:replica_{suffix}", text, labels=LABELS)
            for replica in self._engine.replicas:
                family.add_metric((self._model_name, str(replica.number)), read(replica))
            yield family
