"""What became of the requests of one side, in the order in which they arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chairlift.canary.gates import Metric

Floats = NDArray[np.float64]

OPEN: Final = 0
ANSWERED: Final = 1
FAILED: Final = 2
LEFT: Final = 3
"""The client hung up before the end, so that nobody knows how it would have ended."""
DROPPED: Final = 4
"""Says nothing of the side, such as a request that both sides refuse."""

OUTCOMES = {ANSWERED: "answered", FAILED: "failed", LEFT: "client_left", DROPPED: "refused"}


@dataclass(slots=True, eq=False)
class Sample:
    """One request, while it is open.

    Time in which the client did not take what was ready is not held against the side.

    Attributes:
        index: its place in the log.
        started: when it came, in seconds, later by the time that its client kept it waiting.
        ttft: seconds to the first token, when it is known.
        blocked_since: when it began to wait for its client, if it does.
    """

    index: int
    started: float
    ttft: float | None = None
    blocked_since: float | None = None

    def block(self, now: float) -> None:
        """Its client does not read."""
        self.blocked_since = now

    def unblock(self, now: float) -> None:
        """Its client reads again."""
        if self.blocked_since is not None:
            self.started += now - self.blocked_since
            self.blocked_since = None

    def first_token(self, now: float) -> None:
        """Its first token came; later calls change nothing."""
        if self.ttft is None:
            self.ttft = now - self.started

    def age(self, now: float) -> float:
        """Seconds that the side has spent on it."""
        return (now if self.blocked_since is None else self.blocked_since) - self.started


@dataclass(frozen=True, slots=True)
class Column:
    """One number of each request, in order of arrival, with the indices of the requests.

    Attributes:
        values: [n].
        indices: [n], rising.
    """

    values: Floats
    indices: NDArray[np.int64]

    def since(self, index: int) -> Floats:
        """Returns the values of the requests from ``index`` on."""
        return self.values[np.searchsorted(self.indices, index) :]


@dataclass(frozen=True, slots=True)
class View:
    """One number of each request, from both ends.

    Attributes:
        at_least: what it is at least, of every request that came; infinity for one that failed.
        at_most: what it is at most, of the first ones up to where too little is known.
        left: how long those had waited, before that point, whose clients left.
    """

    at_least: Column
    at_most: Column
    left: Column


@dataclass(slots=True)
class SampleLog:
    """The requests of one side. Indices count from the first one ever; old ones can be forgotten."""

    _first: int = 0
    _size: int = 0
    _state: NDArray[np.int8] = field(default_factory=lambda: np.zeros(1024, np.int8))
    _times: dict[Metric, Floats] = field(
        default_factory=lambda: {"e2e": np.full(1024, np.nan), "ttft": np.full(1024, np.nan)}
    )
    _open: dict[int, Sample] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The index that the next request gets."""
        return self._first + self._size

    @property
    def open_samples(self) -> list[Sample]:
        """Those that have not ended."""
        return list(self._open.values())

    def begin(self, now: float) -> Sample:
        """Enters a request that arrives now."""
        if self._size == len(self._state):
            self._grow()
        sample = Sample(self.end, now)
        self._state[self._size] = OPEN
        for times in self._times.values():
            times[self._size] = np.nan
        self._size += 1
        self._open[sample.index] = sample
        return sample

    def finish(self, sample: Sample, outcome: int, now: float) -> bool:
        """Says how a request ended. Returns whether this counts: it does once, for a request of this log."""
        if self._open.pop(sample.index, None) is None:
            return False
        sample.unblock(now)
        row = sample.index - self._first
        if row < 0:
            return True
        self._state[row] = outcome
        failed = outcome == FAILED
        self._times["e2e"][row] = math.inf if failed else sample.age(now)
        if sample.ttft is not None:
            self._times["ttft"][row] = sample.ttft
        else:
            self._times["ttft"][row] = math.inf if failed else sample.age(now)
        return True

    def forget_before(self, index: int) -> None:
        """Drops the requests before ``index``. Those of them that are open are not looked at again."""
        drop = min(max(index - self._first, 0), self._size)
        if drop < len(self._state) // 2:  # moving the rest costs time; only when it pays
            return
        kept = self._size - drop
        self._state[:kept] = self._state[drop : self._size].copy()
        for times in self._times.values():
            times[:kept] = times[drop : self._size].copy()
        self._first += drop
        self._size = kept

    def view(self, metric: Metric, since: int, now: float) -> View:
        """Returns what is known of the requests from index ``since`` on.

        A request that is open is in ``at_least`` with its age. In ``at_most`` it counts as ∞ once it is older than any
        that was answered; before that, all that came after it wait for it: fast answers arrive first, and to take them
        without those that are still on their way would be to look at the fast ones only.
        """
        start = max(since - self._first, 0)
        state = self._state[start : self._size]
        if metric == "error":
            known = np.where(state == FAILED, 1.0, 0.0)
            unknown = state == OPEN
        else:
            known = self._times[metric][start : self._size].copy()
            unknown = state == OPEN
        ages = np.zeros(len(state))
        for index, sample in self._open.items():
            row = index - self._first - start
            if row < 0:
                continue
            ages[row] = sample.age(now)
            if metric == "ttft" and sample.ttft is not None:
                known[row], unknown[row] = sample.ttft, False
        answered = self._times["ttft" if metric == "ttft" else "e2e"][start : self._size][state == ANSWERED]
        patience = float(answered.max()) if len(answered) else math.inf
        waiting = np.flatnonzero(unknown & (ages <= patience))
        cut = int(waiting[0]) if len(waiting) else len(state)

        indices = np.arange(self._first + start, self._first + start + len(state))
        at_least = np.where(unknown, 0.0 if metric == "error" else ages, known)
        at_most = np.where(unknown, 1.0 if metric == "error" else math.inf, known)
        counted = state != DROPPED
        settled = counted & (state != LEFT)
        left = (state == LEFT) & (metric != "error")
        settled[cut:] = left[cut:] = False
        return View(
            Column(at_least[counted], indices[counted]),
            Column(at_most[settled], indices[settled]),
            Column(known[left], indices[left]),
        )

    def counts(self, since: int) -> dict[str, int]:
        """Returns how many of the requests from ``since`` on ended in each way."""
        state = self._state[max(since - self._first, 0) : self._size]
        return {name: int((state == outcome).sum()) for outcome, name in OUTCOMES.items()} | {
            "open": int((state == OPEN).sum())
        }

    def answered_times(self, metric: Metric, since: int) -> Floats:
        """Returns the seconds of the answered requests from ``since`` on."""
        start = max(since - self._first, 0)
        times: Floats = self._times[metric][start : self._size][self._state[start : self._size] == ANSWERED]
        return times

    def _grow(self) -> None:
        self._state = np.concatenate([self._state, np.zeros_like(self._state)])
        for metric, times in self._times.items():
            self._times[metric] = np.concatenate([times, np.full(len(times), np.nan)])
