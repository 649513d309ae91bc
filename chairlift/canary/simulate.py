"""Whole rollouts under a virtual clock: how often gates roll back a candidate, and how soon.

The proxy is left out and everything else is the real thing: shares, samples, judge, rollout.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chairlift.canary.config import CanaryConfig
from chairlift.canary.judge import Judge
from chairlift.canary.rollout import Phase, Rollout
from chairlift.canary.samples import ANSWERED, FAILED, Floats, Sample, SampleLog
from chairlift.canary.shares import Splitter

Behaviour = Callable[[np.random.Generator, int, float], tuple[Floats, float]]
"""From a generator, a number of requests and the time: their latencies in seconds, and how probably each fails."""


def lognormal(median: float, sigma: float, error_rate: float = 0.0) -> Behaviour:
    """Returns a server with latencies of that median, whose logarithm has the standard deviation ``sigma``."""
    return lambda rng, n, _: (median * np.exp(sigma * rng.standard_normal(n)), error_rate)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended.

    Attributes:
        phase: at the end.
        seconds: until it was complete or rolled back, or until the simulation ended.
        reason: of its last event.
        candidate_share: of the requests before that, how many the candidate got.
    """

    phase: Phase
    seconds: float
    reason: str
    candidate_share: float


def simulate_rollout(
    config: CanaryConfig,
    stable: Behaviour,
    candidate: Behaviour,
    *,
    rate: float,
    duration: float,
    seed: int,
    tick: float = 5.0,
    stop_when_complete: bool = False,
) -> Outcome:
    """Runs one rollout with Poisson arrivals.

    Args:
        config: the settings; addresses do not matter.
        stable, candidate: how they behave.
        rate: requests a second, of both sides together.
        duration: seconds; a complete rollout is watched on until then.
        seed: of everything that is random.
        tick: seconds between two looks at the gates.
        stop_when_complete: end as soon as the rollout is complete.
    """
    rng = np.random.default_rng(seed)
    logs = {True: SampleLog(), False: SampleLog()}
    behaviours = {True: candidate, False: stable}
    judge = Judge(
        config.gates,
        logs[True],
        logs[False],
        window=config.window,
        min_samples=config.min_samples,
        false_rollback=config.false_rollback,
        false_pass=config.false_pass,
    )
    rollout = Rollout(config.steps, config.hold, config.promote_undecided)
    rollout.start(0.0, 0.0)
    judge.begin_step(0.0)
    splitter = Splitter()
    ends: list[tuple[float, int, bool, Sample, int]] = []
    count = {True: 0, False: 0}
    now = 0.0
    while now < duration and rollout.phase != "rolled_back":
        splitter.set_share(rollout.share)
        arrivals = np.sort(now + tick * rng.random(rng.poisson(rate * tick))).tolist()
        drawn = {side: _draw(rng, behaviour, len(arrivals), now) for side, behaviour in behaviours.items()}
        for arrival, *outcomes in zip(arrivals, drawn[False], drawn[True], strict=True):
            side = splitter.is_candidates(None)
            count[side] += 1
            _begin(logs, ends, side, arrival, *outcomes[side])
        now += tick
        while ends and ends[0][0] <= now:
            _finish(logs, ends)
        readings = judge.read(now, compare=rollout.share < 1)
        changed = rollout.tick(now, now, readings, stable_up=True, candidate_down=None)
        if changed and rollout.phase == "running":
            judge.begin_step(now)
        if stop_when_complete and rollout.phase == "complete":
            break
    total = sum(count.values())
    return Outcome(rollout.phase, now, rollout.events[-1].reason, count[True] / total if total else 0.0)


def _draw(rng: np.random.Generator, behaviour: Behaviour, n: int, now: float) -> list[tuple[float, int]]:
    """How ``n`` requests would end."""
    times, error_rate = behaviour(rng, n, now)
    failed = rng.random(n) < error_rate
    return [(seconds, FAILED if bad else ANSWERED) for seconds, bad in zip(times.tolist(), failed, strict=True)]


def _begin(
    logs: dict[bool, SampleLog], ends: list[tuple[float, int, bool, Sample, int]], side: bool, arrival: float,
    seconds: float, outcome: int,
) -> None:  # fmt: skip
    """Ends what is due by ``arrival``, and begins a request that takes so many seconds."""
    while ends and ends[0][0] <= arrival:
        _finish(logs, ends)
    sample = logs[side].begin(arrival)
    heapq.heappush(ends, (arrival + seconds, sample.index, side, sample, outcome))


def _finish(logs: dict[bool, SampleLog], ends: list[tuple[float, int, bool, Sample, int]]) -> None:
    end, _, side, sample, outcome = heapq.heappop(ends)
    logs[side].finish(sample, outcome, end)
