"""Which share the candidate gets, and why. Knows no clock and no socket: moments are passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.canary.judge import Reading

Phase = Literal["running", "held", "rolled_back", "complete"]
PHASES: tuple[Phase, ...] = ("running", "held", "rolled_back", "complete")
MOST_EVENTS = 200


class NotNowError(Exception):
    """What was asked for makes no sense in this phase; the message says what does."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the rollout.

    Attributes:
        time: seconds since the epoch.
        kind: ``started``, ``promoted``, ``completed``, ``rolled_back``, ``held``, ``resumed``, ``waiting`` or
            ``restored``.
        share: of the traffic, from 0 to 1, that the candidate has after it.
        by: ``gate``, ``router`` or ``operator``.
        reason: for people.
    """

    time: float
    kind: str
    share: float
    by: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class Rollout:
    """The state machine.

    ``running`` moves up a step when the step was held long enough and every gate passes; ``held`` stays where it is;
    ``complete`` is after the last step. All three fall to ``rolled_back`` when a gate fails.

    Attributes:
        steps: shares from 0 to 1, rising.
        hold: seconds that each step lasts at least.
        promote_undecided: move up once the hold is over even if gates are not certain, as long as their estimates pass.
        phase: see above.
        step: index into ``steps``.
        entered: when the step began.
        events: the last :data:`MOST_EVENTS`.
        num_events: how many there were since the router started.
    """

    steps: tuple[float, ...]
    hold: float
    promote_undecided: bool = False
    phase: Phase = "running"
    step: int = 0
    entered: float = 0.0
    events: list[Event] = field(default_factory=list)
    num_events: int = 0
    _waiting_said: bool = False
    _stable_down_said: bool = False

    @property
    def share(self) -> float:
        """The candidate's share of the traffic, from 0 to 1."""
        return 0.0 if self.phase == "rolled_back" else self.steps[self.step]

    @property
    def next_share(self) -> float | None:
        """The share after the next promotion; ``None`` at the last step."""
        return self.steps[self.step + 1] if self.step + 1 < len(self.steps) else None

    def remaining_hold(self, now: float) -> float:
        """Seconds that the step lasts at least from now on."""
        return max(0.0, self.entered + self.hold - now)

    def events_since(self, count: int) -> list[Event]:
        """Returns those after the first ``count`` ones since the router started, as far as they are kept."""
        new = self.num_events - count
        return self.events[-new:] if new else []

    def start(self, now: float, wall: float) -> None:
        """Begins at the first step."""
        self.phase, self.step = "running", 0
        self._enter(now)
        self._say(wall, "started", "router", f"the candidate gets {_percent(self.share)} of the traffic")

    def restore(self, now: float, wall: float) -> None:
        """Goes on after a restart of the router. The step's hold begins anew, as its samples are gone."""
        self._enter(now)
        self._say(wall, "restored", "router", f"went on at {_percent(self.share)}, {self.phase.replace('_', ' ')}")

    def tick(
        self, now: float, wall: float, readings: Sequence[Reading], *, stable_up: bool, candidate_down: str | None
    ) -> bool:
        """Looks at the gates, and moves if they say so.

        Args:
            now: seconds, of the clock of ``entered``.
            wall: seconds since the epoch, for the events.
            readings: what the gates say.
            stable_up: whether there is anything to roll back to.
            candidate_down: why the candidate is taken to be down, if it is.

        Returns:
            whether the share changed.
        """
        if self.phase == "rolled_back":
            return False
        failed = "; ".join(f"{r.gate.text} fails: {r.reason}" for r in readings if r.verdict == "fail")
        cause = failed or (f"the candidate is down: {candidate_down}" if candidate_down else "")
        if cause:
            return self._fail(wall, cause, stable_up)
        self._stable_down_said = False
        if self.phase != "running" or self.remaining_hold(now) > 0:
            return False
        undecided = [r for r in readings if not (r.verdict == "pass" or (self.promote_undecided and r.meets))]
        if undecided:
            if not self._waiting_said:
                self._waiting_said = True
                reason = "; ".join(f"{r.gate.text}: {r.reason}" for r in undecided)
                self._say(wall, "waiting", "gate", f"the hold is over, but not every gate is decided: {reason}")
            return False
        passed = "; ".join(f"{r.gate.text} passes: {r.reason}" for r in readings) or "no gate applies"
        self._promote(now, wall, "gate", passed)
        return True

    def promote(self, now: float, wall: float) -> None:
        """Moves up a step, or starts again at the first one after a rollback.

        Raises:
            NotNowError: there is no further step.
        """
        if self.phase == "complete":
            raise NotNowError("the rollout is complete; there is nothing to promote")
        if self.phase == "rolled_back":
            self.phase, self.step = "running", 0
            self._enter(now)
            self._say(wall, "started", "operator", f"again, with {_percent(self.share)} of the traffic")
            return
        self.phase = "running"
        self._promote(now, wall, "operator", "asked for")

    def hold_here(self, wall: float) -> None:
        """Stays at this step until told otherwise. Gates can still roll back.

        Raises:
            NotNowError: it is not running.
        """
        if self.phase != "running":
            raise NotNowError(f"the rollout is {self.phase.replace('_', ' ')}; only a running one can be held")
        self.phase = "held"
        self._say(wall, "held", "operator", "asked for")

    def resume(self, now: float, wall: float) -> None:
        """Lets a held rollout go on; its step begins anew.

        Raises:
            NotNowError: it is not held.
        """
        if self.phase != "held":
            raise NotNowError(f"the rollout is {self.phase.replace('_', ' ')}; only a held one can be resumed")
        self.phase = "running"
        self._enter(now)
        self._say(wall, "resumed", "operator", "asked for")

    def roll_back(self, wall: float) -> None:
        """Gives all traffic back to stable.

        Raises:
            NotNowError: it has it already.
        """
        if self.phase == "rolled_back":
            raise NotNowError("all traffic is on stable already; promote starts again")
        self.phase = "rolled_back"
        self._say(wall, "rolled_back", "operator", "asked for")

    def _fail(self, wall: float, cause: str, stable_up: bool) -> bool:
        if not stable_up:
            if not self._stable_down_said:
                self._stable_down_said = True
                self._say(wall, "waiting", "router", f"would roll back, but stable is down as well. {cause}")
            return False
        self.phase = "rolled_back"
        self._say(wall, "rolled_back", "gate", cause)
        return True

    def _promote(self, now: float, wall: float, by: str, reason: str) -> None:
        if self.next_share is None:
            self.phase = "complete"
            self._say(wall, "completed", by, reason)
            return
        self.step += 1
        self._enter(now)
        self._say(wall, "promoted", by, reason)

    def _enter(self, now: float) -> None:
        self.entered = now
        self._waiting_said = self._stable_down_said = False

    def _say(self, wall: float, kind: str, by: str, reason: str) -> None:
        self.events.append(Event(wall, kind, self.share, by, reason))
        self.num_events += 1
        del self.events[:-MOST_EVENTS]


def _percent(share: float) -> str:
    return f"{share * 100:g} %"
