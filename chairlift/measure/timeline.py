"""Who held which place of the batch when, worked out from the steps of a run."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from chairlift.measure.records import Run, SequenceWork

Kind = Literal["waiting", "prefill", "decode", "padding", "ended", "recomputed"]
KINDS: tuple[Kind, ...] = ("waiting", "prefill", "decode", "padding", "ended", "recomputed")


@dataclass(slots=True)
class Span:
    """A stretch of time that one request spent in one way.

    Attributes:
        name: of the request.
        lane: its place in the batch, from 0; -1 while it waits.
        kind: "ended" is the time in which its place is computed on for nobody.
        start, end: seconds after the start of the run.
        first_step, last_step: indices of the first and last of the steps in it; -1 while it waits.
    """

    name: str
    lane: int
    kind: Kind
    start: float
    end: float
    first_step: int = -1
    last_step: int = -1


def find_spans(run: Run, slots: int) -> list[Span]:
    """Every request's time, cut where what it does changes. Lanes are taken lowest first.

    A step's time belongs to each sequence in it, split in the ratio of its rows where some of them are padding. Time
    between two steps belongs to the first of them.

    Raises:
        ValueError: more than ``slots`` sequences held a place at once.
    """
    return _Spans(run, slots).find()


class _Spans:
    def __init__(self, run: Run, slots: int) -> None:
        self._steps = run.steps
        self._slots = slots
        self._free = list(range(slots))
        self._lanes: dict[str, int] = {}
        self._spans: list[Span] = []
        self._newest: dict[str, Span] = {}
        self._waiting_since = {request.name: request.sent for request in run.requests}
        self._generating: set[str] = set()
        self._last_use = {item.name: index for index, step in enumerate(run.steps) for item in step.work}

    def find(self) -> list[Span]:
        for index, step in enumerate(self._steps):
            start = step.record.time
            for name in step.preempted:
                self._leave(name)
                self._waiting_since[name] = start
            for name in step.admitted:
                if not self._free:
                    raise ValueError(f"more than {self._slots} sequences held a place in step {step.record.step}")
                self._lanes[name] = heapq.heappop(self._free)
                self._spans.append(Span(name, -1, "waiting", self._waiting_since[name], start))
            for item in step.work:
                self._spend(index, item, start, self._end(index))
            for item in step.work:
                if self._last_use[item.name] == index:
                    self._leave(item.name)
        return self._spans

    def _end(self, index: int) -> float:
        record = self._steps[index].record
        own = record.time + record.elapsed
        if index + 1 == len(self._steps):
            return own
        following = self._steps[index + 1]
        # A pause in which nobody held a place is nobody's.
        goes_on = {item.name for item in self._steps[index].work} & {item.name for item in following.work}
        return following.record.time if goes_on else own

    def _spend(self, index: int, item: SequenceWork, start: float, end: float) -> None:
        real = item.rows - item.padding
        if item.ended:
            kind: Kind = "ended"
        elif item.name not in self._generating:
            kind = "prefill"
        else:
            kind = "decode" if real == 1 else "recomputed"
        between = start + (end - start) * real / item.rows
        if real:
            self._extend(index, item.name, kind, start, between)
        if item.padding:
            self._extend(index, item.name, "padding", between, end)
        if item.sampled:
            self._generating.add(item.name)

    def _extend(self, index: int, name: str, kind: Kind, start: float, end: float) -> None:
        newest = self._newest.get(name)
        if newest is not None and newest.kind == kind and newest.last_step == index - 1:
            newest.end, newest.last_step = end, index
        else:
            span = self._newest[name] = Span(name, self._lanes[name], kind, start, end, index, index)
            self._spans.append(span)

    def _leave(self, name: str) -> None:
        heapq.heappush(self._free, self._lanes.pop(name))
        self._newest.pop(name, None)
