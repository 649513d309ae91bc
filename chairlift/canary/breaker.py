"""Keeps requests away from a candidate that does not answer, and notices when it does again."""

from __future__ import annotations

from dataclasses import dataclass

TRIP_AFTER = 5
"""Failures in a row. With an error rate of 1 %, which a gate may allow, that happens once in 10 billion requests."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: *closed* lets requests pass, *open* lets none, *half-open* lets one at a time try.

    Attributes:
        failures: in a row.
        failing_since: when the first of them was.
        last_cause: why the last one failed.
        reopens: when it next lets one try, in seconds; ``None`` while it is closed.
    """

    failures: int = 0
    failing_since: float | None = None
    last_cause: str = ""
    reopens: float | None = None
    _pause: float = FIRST_PAUSE
    _trying: bool = False

    def state(self, now: float) -> str:
        """Returns ``closed``, ``open`` or ``half-open``."""
        if self.reopens is None:
            return "closed"
        return "open" if now < self.reopens and not self._trying else "half-open"

    def allow(self, now: float) -> bool:
        """Whether a request may pass now. One that tries must be told how it ended, or released."""
        if self.reopens is None:
            return True
        if self._trying or now < self.reopens:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """A request was answered: all is well."""
        self.failures, self.failing_since, self.reopens = 0, None, None
        self._pause, self._trying = FIRST_PAUSE, False

    def failed(self, now: float, cause: str) -> None:
        """A request, or a probe, was not answered."""
        self.failures += 1
        self.last_cause = cause
        if self.failing_since is None:
            self.failing_since = now
        if self._trying:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._trying or (self.reopens is None and self.failures >= TRIP_AFTER):
            self.reopens = now + self._pause
        self._trying = False

    def released(self) -> None:
        """A request that was let pass ended without saying anything of the other side."""
        self._trying = False

    def down_for(self, now: float) -> float:
        """Seconds since the first failure of an open breaker; 0 while it is closed."""
        return now - self.failing_since if self.reopens is not None and self.failing_since is not None else 0.0
