"""Static against continuous batching on one model: the same requests, the same arrivals, the same runner."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal

from chairlift import __version__
from chairlift.config import EngineConfig, available_cores
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import WallClock
from chairlift.engine.executor import Capacity, Executor
from chairlift.measure.definitions import DEFINITIONS, OVER
from chairlift.measure.drive import run_workload
from chairlift.measure.metrics import Metrics, UsefulWork, find_batches, run_metrics
from chairlift.measure.records import Run
from chairlift.measure.workload import Workload
from chairlift.scheduling.plan import RowCounts
from chairlift.scheduling.scheduler import Scheduler

SCHEMA = "chairlift.compare/1"
WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to batch.

    Attributes:
        kind: "static" or "continuous".
        size: sequences in a static batch, or the most in a continuous one.
        timeout: seconds after which a static batch that is not full starts.
    """

    kind: Literal["static", "continuous"]
    size: int
    timeout: float = 0.0

    @property
    def name(self) -> str:
        """Such as "static-4"."""
        return f"{self.kind}-{self.size}"

    def scheduler(self, config: EngineConfig, capacity: Capacity) -> Scheduler:
        """A new scheduler over all of the executor's KV memory, with the other settings of ``config``."""
        if self.kind == "static":
            changed = replace(config, batching="static", static_batch_size=self.size, static_batch_timeout=self.timeout)
        else:
            changed = replace(config, batching="continuous", max_num_seqs=self.size)
        return build_scheduler(changed, capacity)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's runs and their numbers, one of each for a repeat."""

    policy: Policy
    runs: Sequence[Run]
    metrics: Sequence[Metrics]

    def values(self, key: str) -> list[float]:
        """One number over the repeats; empty where it does not apply."""
        return [metrics[key] for metrics in self.metrics if key in metrics]

    def median(self, key: str) -> float | None:
        """Its median over the repeats."""
        values = self.values(key)
        return statistics.median(values) if values else None

    @property
    def typical_run(self) -> Run:
        """The repeat whose duration is the median (the lower one of two), to be drawn."""
        return sorted(self.runs, key=lambda run: run.duration)[(len(self.runs) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and what came of it. The last of ``results`` is the continuous policy's."""

    workload: Workload
    capacity: Capacity
    seed: int
    slos: Mapping[str, float]
    results: Sequence[PolicyResult]

    @property
    def baselines(self) -> Sequence[PolicyResult]:
        """The static policies."""
        return self.results[:-1]

    @property
    def continuous(self) -> PolicyResult:
        """What they are held against."""
        return self.results[-1]

    @property
    def shown(self) -> list[str]:
        """Names of the numbers that at least one policy has, in the order of the table."""
        return [key for key in DEFINITIONS if any(result.values(key) for result in self.results)]

    def change(self, baseline: PolicyResult, key: str) -> float | None:
        """By how many percent continuous batching differs from ``baseline``; ``None`` where that has no meaning."""
        before, after = baseline.median(key), self.continuous.median(key)
        return None if not before or after is None else (after / before - 1) * 100

    def verdicts(self) -> list[str]:
        """A sentence for each static policy: which does better, and by how much. Static is named where it wins."""
        return [self._verdict(baseline) for baseline in self.baselines]

    def _verdict(self, baseline: PolicyResult) -> str:
        parts = []
        for key, label in (("output_throughput", "output tokens/s"), ("p99_e2el_ms", "P99 latency")):
            before, after = baseline.median(key), self.continuous.median(key)
            if not before or not after:
                continue
            low, high = min(baseline.values(key)), max(baseline.values(key))
            apart = max(self.continuous.values(key)) < low or min(self.continuous.values(key)) > high
            ratio = after / before
            better = (ratio > 1) == (DEFINITIONS[key].better > 0)
            note = "" if apart or len(self.continuous.runs) == 1 else ", within the spread of the repeats"
            parts.append(f"{'better' if better else 'WORSE'} {label} (× {ratio:.2f}{note})")
        return f"{self.continuous.policy.name} against {baseline.policy.name}: {', '.join(parts)}"


def compare(
    workload: Workload,
    executor: Executor,
    config: EngineConfig,
    policies: Sequence[Policy],
    *,
    repeats: int = 1,
    seed: int = 0,
    slos: Mapping[str, float] | None = None,
    work: UsefulWork | None = None,
    on_run: Callable[[Policy, int], Callable[[], None]] = lambda _policy, _repeat: lambda: None,
) -> Comparison:
    """Runs every policy on the workload, in turn and ``repeats`` times, after a warm-up that is not counted.

    The order is turned around at every other repeat, so that neither a machine that slows down nor one that speeds up
    favours a policy.

    Args:
        workload: the requests.
        executor: the model; one for all, and left open.
        config: what the executor was made with; the policies change how it batches, and nothing else.
        policies: the static ones, then the continuous one.
        repeats: how often.
        seed: of the workload, for the report.
        slos: objectives in milliseconds.
        work: to compute MFU with.
        on_run: called before each run; what it returns is called after each answer of that run.
    """
    capacity = executor.capacity()
    runs: dict[Policy, list[Run]] = {policy: [] for policy in policies}
    for policy in policies:
        _run(workload.head(WARM_UP_REQUESTS), executor, config, policy, lambda: None)
    for repeat in range(repeats):
        for policy in policies if repeat % 2 == 0 else reversed(policies):
            runs[policy].append(_run(workload, executor, config, policy, on_run(policy, repeat)))
    results = [
        PolicyResult(policy, made, [run_metrics(run, slos, work) for run in made]) for policy, made in runs.items()
    ]
    return Comparison(workload, capacity, seed, slos or {}, results)


def _run(
    workload: Workload, executor: Executor, config: EngineConfig, policy: Policy, on_finish: Callable[[], None]
) -> Run:
    capacity = executor.capacity()
    scheduler = policy.scheduler(config, capacity)
    eos = capacity.eos_token_ids
    return run_workload(workload, scheduler, executor, WallClock(), eos_token_ids=eos, on_finish=on_finish)


def to_json(comparison: Comparison, *, detailed: bool = False) -> dict[str, Any]:
    """The comparison as the JSON document that ``docs/compare.md`` describes."""
    workload, capacity = comparison.workload, comparison.capacity
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "chairlift": __version__,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": available_cores(),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "python": platform.python_version(),
        },
        "model": {f.name: getattr(capacity, f.name) for f in fields(capacity)},
        "workload": {
            "name": workload.name,
            "description": workload.description,
            "seed": comparison.seed,
            "requests": len(workload.requests),
            "clients": workload.clients,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "objectives_ms": dict(comparison.slos),
        "percentiles_over": OVER,
        "policies": [_policy_json(result, detailed) for result in comparison.results],
        "changes": [
            {
                "from": baseline.policy.name,
                "to": comparison.continuous.policy.name,
                "percent": {key: comparison.change(baseline, key) for key in comparison.shown},
            }
            for baseline in comparison.baselines
        ],
        "verdicts": comparison.verdicts(),
    }


def _policy_json(result: PolicyResult, detailed: bool) -> dict[str, Any]:
    keys = dict.fromkeys(key for metrics in result.metrics for key in metrics)
    return {
        "name": result.policy.name,
        "policy": result.policy.kind,
        "size": result.policy.size,
        "timeout": result.policy.timeout if result.policy.kind == "static" else None,
        "metrics": {
            key: {
                "median": result.median(key),
                "min": min(result.values(key)),
                "max": max(result.values(key)),
            }
            for key in keys
        },
        "repeats": [
            {"metrics": metrics, "batches": [_flat(batch) for batch in find_batches(run.steps)]}
            | (_detail_json(run) if detailed else {})
            for run, metrics in zip(result.runs, result.metrics, strict=True)
        ],
    }


def _detail_json(run: Run) -> dict[str, Any]:
    return {
        "requests": [
            _flat(request) | {"token_times": list(request.token_times)}
            for request in sorted(run.requests, key=lambda request: request.sent)
        ],
        "steps": [
            _flat(step.record)
            | {"rows": _flat(step.record.rows), "kv_reserved": step.kv_reserved, "kv_used": step.kv_used}
            | {"admitted": list(step.admitted), "preempted": list(step.preempted)}
            | {"work": [_flat(item) for item in step.work]}
            for step in run.steps
        ],
    }


def _flat(record: Any) -> dict[str, Any]:
    """A record's fields by name; those that are records themselves are left to the caller."""
    return {
        f.name: getattr(record, f.name) for f in fields(record) if not isinstance(getattr(record, f.name), RowCounts)
    }
