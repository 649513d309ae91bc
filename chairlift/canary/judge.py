"""Holds gates against samples, so that one may look at any moment and still be wrong only as often as was agreed.

Two budgets bound the errors, whatever the number of looks:

- ``false_rollback``: the probability that a candidate that keeps to every gate fails one *ever* during a rollout.
- ``false_pass``: the probability that a candidate that violates a gate passes it, ever, within one step.

A window must slide, or a long good past would hide a bad present. So a new *start* is made every eighth of a window.
Each looks at the requests since then, for a window and an eighth. The j-th may spend a share of the budget such
that all shares sum to 1 (:func:`chairlift.canary.evidence.spent`). Within a start the evidence is valid at any time, so
looking costs nothing. A rollout's starts are numbered on through its steps, restarts included; those that can pass a
gate begin with the step. Gates share the first budget equally; the second need not be shared, as a candidate must pass
every gate, the one that it violates included. The two sides of a comparison share the budget of their gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from chairlift.canary.evidence import (
    BELOW,
    evidence_above,
    evidence_below,
    quantile_at_least,
    quantile_at_most,
    rate_bounds,
    spent,
)
from chairlift.canary.gates import Gate
from chairlift.canary.samples import Floats, SampleLog, View

STARTS_PER_WINDOW = 8
PASSING_STARTS_PER_WINDOW = 2
"""Only so many of them can pass a gate: fewer share the budget, and a good candidate is in no such hurry."""
ROLLBACK_PATIENCE = 10
"""About as many starts get the larger shares of the rollback budget."""
PASS_PATIENCE = 1

Verdict = Literal["pass", "fail", "undecided"]
Numbers = tuple[float | None, float, float]


@dataclass(frozen=True)
class Reading:
    """What a gate says now.

    Attributes:
        gate: which.
        verdict: whether it is shown to hold, shown not to hold, or neither.
        samples: requests of the candidate in the window.
        needed: fewest requests with which it can pass, if not one of them exceeds the limit.
        enough: whether there are enough requests to judge at all.
        numbers: returns the estimate in the gate's unit (shares from 0 to 1; ``None`` without samples), and what the
            value is at least and at most, each wrong with a probability of ``1 − DISPLAYED``. Called only when it is
            asked for, as most readings are never looked at.
    """

    gate: Gate
    verdict: Verdict
    samples: int
    needed: int
    enough: bool
    numbers: Callable[[], Numbers]

    @cached_property
    def _numbers(self) -> Numbers:
        return self.numbers()

    @property
    def value(self) -> float | None:
        """The estimate."""
        return self._numbers[0]

    @property
    def low(self) -> float:
        """What the value is at least."""
        return self._numbers[1]

    @property
    def high(self) -> float:
        """What the value is at most."""
        return self._numbers[2]

    @property
    def meets(self) -> bool:
        """Whether the estimate, of enough requests but without any certainty, keeps to the gate."""
        return self.enough and self.value is not None and self.value < self.gate.bound

    @property
    def reason(self) -> str:
        """The verdict and its numbers, for people."""
        gate = self.gate
        if self.value is None:
            return "no requests yet"
        shown = (
            f"{gate.show(self.value)} ({gate.show(self.low)} to {gate.show(self.high)}) over {self.samples} requests"
        )
        if self.verdict != "undecided":
            return f"{shown}, {'<' if self.verdict == 'pass' else '≥'} {gate.show(gate.bound)}"
        if self.samples < self.needed:
            return f"{shown}; it takes at least {self.needed} in a window"
        return f"{shown}; not certain yet"


DISPLAYED = 0.95


@dataclass(frozen=True, slots=True)
class _Start:
    time: float
    candidate: int
    stable: int
    number: int
    step_number: int | None


class Judge:
    """Reads the gates.

    Args:
        gates: at least one.
        candidate, stable: their samples, which others fill.
        window: seconds.
        min_samples: requests of the candidate that it takes to pass or fail a gate, however clear they are.
        false_rollback, false_pass: the two budgets, between 0 and 1.
        spent_starts: starts that this rollout had before the router was restarted.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        candidate: SampleLog,
        stable: SampleLog,
        *,
        window: float,
        min_samples: int,
        false_rollback: float,
        false_pass: float,
        spent_starts: int = 0,
    ) -> None:
        self._gates = tuple(gates)
        self._candidate = candidate
        self._stable = stable
        self._window = window
        self._min_samples = min_samples
        self._false_rollback = false_rollback / len(self._gates)
        self._false_pass = false_pass
        self._starts: list[_Start] = []
        self.spent_starts = spent_starts
        self._step_starts = 0

    def begin_rollout(self, now: float) -> None:
        """Starts anew, with a new budget; what was seen before no longer counts."""
        self._starts.clear()
        self.spent_starts = 0
        self.begin_step(now)

    def begin_step(self, now: float) -> None:
        """From here on requests may pass gates for the new step. Those before can still fail one."""
        self._starts = [_Start(start.time, start.candidate, start.stable, start.number, None) for start in self._starts]
        self._step_starts = 0
        self._start(now)

    def read(self, now: float, *, compare: bool) -> list[Reading]:
        """Returns what each gate says now.

        Args:
            now: seconds.
            compare: whether the stable side has traffic to compare with; without, gates against it are left out.
        """
        spacing = self._window / STARTS_PER_WINDOW
        if not self._starts or now - self._starts[-1].time >= spacing:
            self._start(now)
        self._starts = [start for start in self._starts if now - start.time <= self._window + spacing]
        candidate_since, stable_since = self.since
        self._candidate.forget_before(candidate_since)
        self._stable.forget_before(stable_since)
        gates = [gate for gate in self._gates if compare or not gate.relative]
        metrics = {gate.metric for gate in gates}
        candidate = {metric: self._candidate.view(metric, candidate_since, now) for metric in metrics}
        stable = {gate.metric: self._stable.view(gate.metric, stable_since, now) for gate in gates if gate.relative}
        return [self._read(gate, candidate[gate.metric], stable.get(gate.metric)) for gate in gates]

    @property
    def since(self) -> tuple[int, int]:
        """The first request in the window, of the candidate and of stable."""
        return (self._starts[0].candidate, self._starts[0].stable) if self._starts else (0, 0)

    def _start(self, now: float) -> None:
        self.spent_starts += 1
        every = STARTS_PER_WINDOW // PASSING_STARTS_PER_WINDOW
        can_pass = self._step_starts % every == 0
        step_number = self._step_starts // every + 1 if can_pass else None
        self._step_starts += 1
        self._starts.append(_Start(now, self._candidate.end, self._stable.end, self.spent_starts, step_number))

    def _read(self, gate: Gate, candidate: View, stable: View | None) -> Reading:
        verdict: Verdict = "undecided"
        for start in self._starts:
            fail_alpha = self._false_rollback * spent(start.number, ROLLBACK_PATIENCE)
            pass_alpha = self._false_pass * spent(start.step_number, PASS_PATIENCE) if start.step_number else 0.0
            if stable is None:
                said = self._hold_against_limit(gate, start, candidate, fail_alpha, pass_alpha)
            else:
                said = self._compare(gate, start, candidate, stable, fail_alpha, pass_alpha)
            if said == "fail":
                return self._reading(gate, start, candidate, stable, "fail")
            if said == "pass":
                verdict = "pass"
        return self._reading(gate, self._starts[0], candidate, stable, verdict)

    def _hold_against_limit(
        self, gate: Gate, start: _Start, view: View, fail_alpha: float, pass_alpha: float
    ) -> Verdict:
        limit = 0.5 if gate.metric == "error" else gate.limit
        at_least = view.at_least.since(start.candidate)
        n, bad = len(at_least), int((at_least > limit).sum())
        # Where fewer are bad than allowed, there is no evidence that there are more; the sums can be spared.
        suspicious = n >= self._min_samples and bad > n * gate.allowed
        if suspicious and evidence_above(bad, n, gate.allowed) >= -math.log(fail_alpha):
            return "fail"
        if not pass_alpha:
            return "undecided"
        at_most = view.at_most.since(start.candidate)
        too_late = int((view.left.since(start.candidate) > limit).sum())
        n, bad = len(at_most) + too_late, int((at_most > limit).sum()) + too_late
        promising = n >= self._min_samples and bad < n * gate.allowed
        if promising and evidence_below(bad, n, gate.allowed) >= -math.log(pass_alpha):
            return "pass"
        return "undecided"

    def _compare(
        self, gate: Gate, start: _Start, candidate: View, stable: View, fail_alpha: float, pass_alpha: float
    ) -> Verdict:
        at_least, at_most = candidate.at_least.since(start.candidate), candidate.at_most.since(start.candidate)
        if len(at_least) >= self._min_samples:
            least = quantile_at_least(at_least, gate.allowed, fail_alpha / 2)
            most = quantile_at_most(stable.at_most.since(start.stable), gate.allowed, fail_alpha / 2)
            if least > gate.limit * most:
                return "fail"
        if pass_alpha and len(at_most) >= self._min_samples:
            most = quantile_at_most(at_most, gate.allowed, pass_alpha / 2)
            least = quantile_at_least(stable.at_least.since(start.stable), gate.allowed, pass_alpha / 2)
            if most < gate.limit * least:
                return "pass"
        return "undecided"

    def _reading(self, gate: Gate, start: _Start, candidate: View, stable: View | None, verdict: Verdict) -> Reading:
        """The verdict on the requests since ``start``."""
        samples = len(candidate.at_least.since(start.candidate))
        needed = max(self._min_samples, self._least_to_pass(gate))
        numbers = partial(_estimate, gate, start, candidate, stable)
        return Reading(gate, verdict, samples, needed, samples >= self._min_samples, numbers)

    def _least_to_pass(self, gate: Gate) -> int:
        """How many requests it takes to pass the gate if not one of them exceeds the limit."""
        alpha = self._false_pass * spent(1, PASS_PATIENCE) / (2 if gate.relative else 1)
        return math.ceil((math.log(len(BELOW)) - math.log(alpha)) / -math.log1p(-gate.allowed))


def _estimate(gate: Gate, start: _Start, view: View, stable: View | None) -> Numbers:
    """The estimate since ``start``, and what the value is at least and at most."""
    alpha = 1 - DISPLAYED
    at_least, at_most = view.at_least.since(start.candidate), view.at_most.since(start.candidate)
    n = len(at_least)
    if n == 0:
        return None, 0.0, math.inf
    if gate.metric == "error":
        low = rate_bounds(int(at_least.sum()), n, alpha)[0]
        high = rate_bounds(int(at_most.sum()), len(at_most), alpha)[1]
        return float(at_least.mean()), low, high
    value = _quantile(at_least, gate.allowed)
    low = quantile_at_least(at_least, gate.allowed, alpha)
    high = quantile_at_most(at_most, gate.allowed, alpha)
    if stable is None:
        return value, low, high
    base_values = stable.at_least.since(start.stable)
    if not len(base_values):
        return None, 0.0, math.inf
    base = _quantile(base_values, gate.allowed)
    base_low = quantile_at_least(base_values, gate.allowed, alpha)
    base_high = quantile_at_most(stable.at_most.since(start.stable), gate.allowed, alpha)
    return _ratio(value, base), _ratio(low, base_high), _ratio(high, base_low, math.inf)


def _quantile(values: Floats, share_above: float) -> float:
    """The smallest value that no more than that share of the values exceed."""
    exceeding = math.floor(len(values) * share_above + 1e-9)
    return float(np.partition(values, len(values) - 1 - exceeding)[len(values) - 1 - exceeding])


def _ratio(over: float, under: float, otherwise: float = 0.0) -> float:
    """A quotient of quantiles; of one that is not bounded, what it is at least or at most."""
    if math.isinf(over):
        return over
    return over / under if 0 < under < math.inf else otherwise
