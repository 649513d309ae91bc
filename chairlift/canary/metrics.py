"""What Prometheus scrapes of the router. Names and buckets follow :mod:`chairlift.engine.metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from chairlift.canary.judge import Reading
from chairlift.canary.rollout import PHASES, Rollout
from chairlift.canary.samples import ANSWERED, OUTCOMES, Sample
from chairlift.engine.metrics import REQUEST_TIME_BUCKETS, TTFT_BUCKETS

SIDES = ("stable", "candidate")
VERDICTS = {"fail": -1, "undecided": 0, "pass": 1}


class CanaryMetrics:
    """The metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = self._counter("requests", "Requests of a side, by how they ended.", ("side", "outcome"))
        self._requests = {
            (side, outcome): requests.labels(side, name) for side in SIDES for outcome, name in OUTCOMES.items()
        }
        e2e = self._histogram("e2e_request_latency_seconds", "Seconds to the end of an answer.", REQUEST_TIME_BUCKETS)
        ttft = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", TTFT_BUCKETS)
        self._e2e = {side: e2e.labels(side) for side in SIDES}
        self._ttft = {side: ttft.labels(side) for side in SIDES}
        self.fallbacks = self._counter("fallbacks", "Requests of the candidate that stable answered.", ("cause",))
        self.broken_streams = self._counter(
            "broken_streams", "Streams of the candidate that broke after a client had seen some of it.", ()
        )
        self.shadow = self._counter("shadow", "Copies, by how their answers compare.", ("result",))
        assigned = self._counter("assigned", "Requests by the side that they were assigned to.", ("side",))
        self.assigned = {side: assigned.labels(side) for side in SIDES}
        self._share = self._gauge("share", "The candidate's share of the traffic; 1 is all.", ())
        self._phase = self._gauge("phase", "1 for the phase that the rollout is in.", ("phase",))
        self._up = self._gauge("up", "Whether a side is well, as its probes and requests say.", ("side",))
        self._gate = self._gauge("gate", "What a gate says: 1 pass, 0 undecided, -1 fail.", ("gate",))
        self._value = self._gauge("gate_value", "What a gate bounds, as estimated over the window.", ("gate",))

    def ended(self, side: str, outcome: int, sample: Sample, now: float) -> None:
        """Counts a request that ended."""
        self._requests[side, outcome].inc()
        if outcome == ANSWERED:
            age = sample.age(now)
            self._e2e[side].observe(age)
            self._ttft[side].observe(age if sample.ttft is None else sample.ttft)

    def render(self, rollout: Rollout, readings: Iterable[Reading], up: dict[str, bool]) -> bytes:
        """Returns every metric in Prometheus' text format."""
        self._share.set(rollout.share)
        for phase in PHASES:
            self._phase.labels(phase).set(phase == rollout.phase)
        for side, is_up in up.items():
            self._up.labels(side).set(is_up)
        for reading in readings:
            self._gate.labels(reading.gate.text).set(VERDICTS[reading.verdict])
            if reading.value is not None:
                self._value.labels(reading.gate.text).set(reading.value)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"chairlift:canary_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(f"chairlift:canary_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"chairlift:canary_{name}", text, ("side",), registry=self.registry, buckets=buckets)
