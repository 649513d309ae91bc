"""Where the engine's time comes from: the wall, or a simulation that moves it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes back."""

    def now(self) -> float:
        """Returns the time."""
        ...

    def advance(self, seconds: float) -> None:
        """Is told how long a step took."""
        ...


class WallClock:
    """The system's monotonic clock, which all processes of a machine share. It advances by itself."""

    def now(self) -> float:
        """Returns seconds since the machine started."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Does nothing: the time has passed."""


class VirtualClock:
    """A clock that only moves when it is told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Returns seconds since the simulation's beginning, if ``start`` was 0."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the time by ``seconds``."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._now += seconds
