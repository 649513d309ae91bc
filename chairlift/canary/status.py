"""The state of a router as JSON, for the page, the terminal and programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift import __version__
from chairlift.canary.gates import Metric
from chairlift.canary.judge import Reading
from chairlift.canary.samples import SampleLog

if TYPE_CHECKING:
    from chairlift.canary.router import Router


def status_of(router: Router, now: float) -> dict[str, Any]:
    """Returns the state.

    Args:
        router: whose.
        now: seconds, of its clock.
    """
    config, rollout, proxy = router.config, router.rollout, router.proxy
    candidate_since, stable_since = router.judge.since
    up = router.up()
    return {
        "version": __version__,
        "phase": rollout.phase,
        "share": rollout.share,
        "next_share": rollout.next_share,
        "step": rollout.step + 1,
        "steps": list(rollout.steps),
        "hold_remaining_s": round(rollout.remaining_hold(now), 1),
        "window_s": config.window,
        "false_rollback_bound": config.false_rollback,
        "sessions": len(router.splitter),
        "shadow": proxy.shadow_results if config.shadow else None,
        "sides": {
            "stable": {
                "url": config.stable,
                "up": up["stable"],
                "assigned": proxy.assigned["stable"],
                **_numbers(proxy.logs["stable"], stable_since),
            },
            "candidate": {
                "url": config.candidate,
                "up": up["candidate"],
                "assigned": proxy.assigned["candidate"],
                "breaker": proxy.breaker.state(now),
                "last_failure": proxy.breaker.last_cause or None,
                **_numbers(proxy.logs["candidate"], candidate_since),
            },
        },
        "gates": [_gate(reading) for reading in router.readings],
        "events": [event.as_dict() for event in rollout.events],
    }


def _numbers(log: SampleLog, since: int) -> dict[str, Any]:
    """Counts and latencies (seconds, of answered requests) over the window."""
    numbers: dict[str, Any] = {"requests": log.counts(since)}
    metrics: tuple[Metric, ...] = ("e2e", "ttft")
    for metric in metrics:
        times = log.answered_times(metric, since)
        for percent in (50, 99):
            value = float(np.percentile(times, percent)) if len(times) else None
            numbers[f"p{percent}_{metric}_s"] = None if value is None else round(value, 6)
    ended = numbers["requests"]["answered"] + numbers["requests"]["failed"]
    numbers["error_rate"] = numbers["requests"]["failed"] / ended if ended else None
    return numbers


def _gate(reading: Reading) -> dict[str, Any]:
    return {
        "gate": reading.gate.text,
        "unit": reading.gate.unit,
        "bound": reading.gate.bound,
        "verdict": reading.verdict,
        "value": _finite(reading.value),
        "low": _finite(reading.low),
        "high": _finite(reading.high),
        "samples": reading.samples,
        "reason": reading.reason,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
