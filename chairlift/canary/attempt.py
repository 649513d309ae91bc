"""One request at one server, under the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from chairlift.canary.config import Timeouts
from chairlift.canary.connection import UpstreamError
from chairlift.canary.samples import Sample

LONGEST_OVERSLEPT = 0.5
"""Seconds by which the watchdog may wake too late before it is taken that the whole router stood still."""


class OverdueError(UpstreamError):
    """The server took too long."""


class RolledBackError(Exception):
    """The candidate lost its traffic before it had answered anything."""


class Attempt:
    """A request at a server, which can be ended from outside.

    Attributes:
        sample: its clock.
        streams: whether the answer is to come as a stream.
    """

    def __init__(self, sample: Sample, *, streams: bool) -> None:
        self.sample = sample
        self.streams = streams
        self._begun = self._last = time.monotonic()
        self._any_byte = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._cause: Exception | None = None

    def __enter__(self) -> None:
        """From here on it can be ended."""
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101 - it is what runs this
        self._cancelling = self._task.cancelling()
        self._cause = None  # of an earlier try

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Turns its own cancellation, but nobody else's, into what it was ended for; see :class:`asyncio.Timeout`."""
        task, self._task = self._task, None
        if self._cause is None or task is None:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._cause from None

    def heard(self) -> float:
        """Something of the body came; returns the time."""
        self._any_byte = True
        self._last = time.monotonic()
        return self._last

    def forgive(self, seconds: float) -> None:
        """Takes time off the account in which the router itself stood still, and could not have heard anything."""
        self._begun += seconds
        self._last += seconds

    def end(self, cause: Exception) -> None:
        """Ends it from outside: ``cause`` is raised where it waits."""
        if self._task is not None and self._cause is None:
            self._cause = cause
            self._task.cancel()

    def check(self, now: float, timeouts: Timeouts) -> None:
        """Ends it if it is overdue."""
        if self.sample.blocked_since is not None:
            self._last = now  # what the server has sent meanwhile lies in buffers
        elif now - self._begun > timeouts.total and self.sample.age(now) > timeouts.total:
            self.end(OverdueError(f"no end after {timeouts.total:g} s"))
        elif self.streams and not self._any_byte and now - self._begun > timeouts.first_byte:
            self.end(OverdueError(f"nothing came for {timeouts.first_byte:g} s"))
        elif self._any_byte and now - self._last > timeouts.idle:
            self.end(OverdueError(f"the answer stood still for {timeouts.idle:g} s"))


class Watchdog:
    """Ends attempts that are overdue."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._attempts: set[Attempt] = set()

    @contextmanager
    def watching(self, attempt: Attempt) -> Iterator[None]:
        """Watches ``attempt`` while it goes on inside, in the task that runs this."""
        self._attempts.add(attempt)
        try:
            with attempt:
                yield
        finally:
            self._attempts.discard(attempt)

    async def run(self) -> None:
        """Looks after all attempts, for ever."""
        shortest = min(self._timeouts.first_byte, self._timeouts.idle, self._timeouts.total)
        pause = min(0.25, shortest / 4)
        before = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            overslept = now - before - pause
            before = now
            for attempt in tuple(self._attempts):
                if overslept > LONGEST_OVERSLEPT:
                    attempt.forgive(overslept)
                attempt.check(now, self._timeouts)
