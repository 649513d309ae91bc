"""What a deployment can do, found by simulating it again and again: rate, limits, replicas, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from chairlift.measure.metrics import Metrics, meets, request_metrics
from chairlift.measure.records import RequestRecord
from chairlift.measure.workload import Workload
from chairlift.simulate.cost import StepCost
from chairlift.simulate.fleet import Fleet, Outcome, step_totals, with_rate
from chairlift.simulate.setup import capacity, check_fits, engine_config
from chairlift.simulate.sizes import Deployment, SizingError

MOST_REPLICAS = 256
RATE_TOLERANCE = 0.02
SEQUENCES = (8, 16, 32, 64, 128, 256, 512)
TOKENS = (256, 512, 1024, 2048, 4096, 8192)
NoteProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a simulation except how much work there is.

    Attributes:
        deployment: each replica.
        cost: its step times.
        replicas, routing: the fleet.
        prefix_caching, preemption_mode: of each scheduler.
        static_batch_size, static_batch_timeout: static batches of this size, instead of continuous batching.
    """

    deployment: Deployment
    cost: StepCost
    replicas: int = 1
    routing: str = "least-load"
    prefix_caching: bool = False
    preemption_mode: str = "auto"
    static_batch_size: int | None = None
    static_batch_timeout: float = 0.1

    def run(
        self, workload: Workload, *, detail: bool = False, give_up: Callable[[RequestRecord], bool] = lambda _: False
    ) -> Outcome:
        """Simulates a workload."""
        config = engine_config(
            self.deployment,
            prefix_caching=self.prefix_caching,
            static_batch_size=self.static_batch_size,
            static_batch_timeout=self.static_batch_timeout,
            preemption_mode=self.preemption_mode,
        )
        fleet = Fleet(
            config,
            capacity(self.deployment, self.cost),
            self.cost,
            replicas=self.replicas,
            routing=self.routing,
            detail=detail,
            give_up=give_up,
        )
        return fleet.run(workload)


def outcome_metrics(outcome: Outcome, slos: Mapping[str, float] | None = None) -> Metrics:
    """The numbers of a simulation, under the names of ``compare``."""
    return request_metrics(outcome.requests, outcome.duration, slos) | step_totals(outcome)


@dataclass(frozen=True, slots=True)
class Attainment:
    """A share of requests that must meet all objectives.

    Attributes:
        slos: objectives in milliseconds.
        share: of the requests.
    """

    slos: Mapping[str, float]
    share: float

    def __post_init__(self) -> None:
        if not self.slos:
            raise SizingError("a search needs objectives: give --goodput, such as --goodput ttft:1000 tpot:50")
        if not 0 < self.share <= 1:
            raise SizingError(f"--attainment must be in (0, 1], got {self.share:g}")

    def reached(self, setting: Setting, workload: Workload) -> bool:
        """Whether a simulation meets it; given up as soon as it cannot."""
        allowed = int(len(workload.requests) * (1 - self.share) + 1e-9)
        missed = 0

        def give_up(record: RequestRecord) -> bool:
            nonlocal missed
            missed += not meets(record, self.slos)
            return missed > allowed

        return not setting.run(workload, give_up=give_up).aborted


def largest_rate(
    setting: Setting, workload: Workload, goal: Attainment, note: NoteProgress = lambda _: None
) -> float | None:
    """The largest request rate at which the objectives are met, to 2 %; ``None`` if even a trickle misses them.

    The requests and the pattern of their arrivals stay the same; only the time between them is stretched.
    """

    def met(rate: float) -> bool:
        reached = goal.reached(setting, with_rate(workload, rate))
        note(f"{rate:.3g} requests/s: {'met' if reached else 'missed'}")
        return reached

    rate = len(workload.requests) / max(request.arrival for request in workload.requests)
    low, high = (rate, math.inf) if met(rate) else (0.0, rate)
    while math.isinf(high):
        low, high = (low * 2, high) if met(low * 2) else (low, low * 2)
        if low > 1e6:
            raise SizingError("the objectives are met at any rate: they ask for nothing")
    while not low:
        low, high = (high / 2, high) if met(high / 2) else (0.0, high / 2)
        if high < 1e-4:
            return None
    while high / low > 1 + RATE_TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if met(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Limits:
    """One choice of limits and what came of it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    metrics: Metrics


def best_limits(
    setting: Setting, workload: Workload, slos: Mapping[str, float], note: NoteProgress = lambda _: None
) -> list[Limits]:
    """Tries sequences and token budgets; the best first.

    Best is the most requests a second that meet the objectives, or without any, the most output tokens a second; among
    those within 1 % of it, the lowest P99 of E2E latency.
    """
    tried = []
    for seqs in SEQUENCES:
        for tokens in TOKENS:
            if tokens < seqs:
                continue
            changed = replace(setting.deployment, max_num_seqs=seqs, max_num_batched_tokens=tokens)
            if changed.kv_tokens < changed.max_model_len:
                note(f"{seqs} sequences, {tokens} tokens: its activations leave no room for a whole sequence")
                continue
            outcome = replace(setting, deployment=changed).run(workload)
            tried.append(Limits(seqs, tokens, outcome_metrics(outcome, slos)))
            note(f"{seqs} sequences, {tokens} tokens: {tried[-1].metrics['output_throughput']:,.0f} output tokens/s")
    if not tried:
        check_fits(setting.deployment)
        raise SizingError("no limits leave room for one sequence of --max-model-len; lower it, or use more memory")
    key = "request_goodput" if slos else "output_throughput"
    best = max(limits.metrics[key] for limits in tried)
    return sorted(
        tried,
        key=lambda limits: (
            limits.metrics[key] < 0.99 * best,
            limits.metrics["p99_e2el_ms"] if limits.metrics[key] >= 0.99 * best else -limits.metrics[key],
        ),
    )


def fewest_replicas(
    setting: Setting, workload: Workload, goal: Attainment, note: NoteProgress = lambda _: None
) -> int | None:
    """The fewest replicas that meet the objectives on this workload; ``None`` if no number up to 256 does."""

    def met(replicas: int) -> bool:
        reached = goal.reached(replace(setting, replicas=replicas), workload)
        note(f"{replicas} replicas: {'met' if reached else 'missed'}")
        return reached

    high = 1
    while not met(high):
        high *= 2
        if high > MOST_REPLICAS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def cost_per_million(metrics: Metrics, price: float, devices: int) -> dict[str, float]:
    """What a million tokens cost, output alone and prompt and output together.

    Args:
        metrics: of the simulation.
        price: of one device for an hour.
        devices: in all replicas together.
    """
    hourly = price * devices
    return {
        f"price_per_million_{name}": hourly / (metrics[key] * 3600 / 1e6)
        for name, key in (("output_tokens", "output_throughput"), ("tokens", "total_token_throughput"))
    }


def describe_limits(tried: Sequence[Limits], count: int = 5) -> list[str]:
    """A line for each of the best."""
    return [
        f"--max-num-seqs {limits.max_num_seqs} --max-num-batched-tokens {limits.max_num_batched_tokens}: "
        f"{limits.metrics['output_throughput']:,.0f} output tokens/s, "
        + (f"{limits.metrics['request_goodput']:.2f} good requests/s, " if "request_goodput" in limits.metrics else "")
        + f"P99 {limits.metrics['p99_e2el_ms'] / 1000:.2f} s, {limits.metrics['preemptions']:.0f} preemptions"
        for limits in tried[:count]
    ]
