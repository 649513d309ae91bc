"""What every batching policy does for the engine's loop."""

from __future__ import annotations

from typing import Protocol

from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import SequenceDelta, StepPlan, StepResult
from chairlift.scheduling.request import Request


class RequestRefusedError(ValueError):
    """The request can never run, whatever else is running. The message says why, with the arithmetic."""


class Scheduler(Protocol):
    """Decides what the next step computes. Time is passed in, never read; one thread calls it."""

    kv: KVManager

    @property
    def num_running(self) -> int:
        """Requests that own device blocks."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that own none."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def add(self, request: Request) -> None:
        """Takes a new request.

        Raises:
            RequestRefusedError: it could never run to its end.
        """
        ...

    def abort(self, request_id: str) -> SequenceDelta | None:
        """Ends a request in whatever state it is and frees its blocks; ``None`` if there is no such request."""
        ...

    def plan(self, now: float) -> StepPlan:
        """Decides the next step. Every plan that is not empty must be executed and then committed, before the next."""
        ...

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDelta]:
        """Takes what the step computed; returns the new tokens. Requests aborted since are passed over."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not add up. Called by tests after every step."""
        ...
