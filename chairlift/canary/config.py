"""What the router is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from chairlift.canary.gates import EXAMPLE, Gate, parse_gates
from chairlift.canary.session import SessionRule
from chairlift.config import ConfigError

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Returns the seconds of ``90s``, ``5m`` or ``1h30m``.

    Raises:
        ValueError: it is none.
    """
    if not _DURATION.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is no duration; write a number and a unit, such as 90s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def parse_steps(text: str) -> tuple[float, ...]:
    """Returns the shares from 0 to 1 of ``10,25,50,100``.

    Raises:
        ValueError: they are no rising percentages.
    """
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} must be percentages that rise, such as 10,25,50,100") from None
    if not all(0 < percent <= 100 for percent in percents):
        raise ValueError(f"{text!r}: each step must lie above 0 and be at most 100")
    if any(later <= earlier for earlier, later in pairwise(percents)):
        raise ValueError(f"{text!r}: each step must be larger than the one before")
    return tuple(percent / 100 for percent in percents)


def parse_upstream(name: str, url: str) -> str:
    """Returns the base URL of a server, without the ``/v1`` that the paths of the API begin with.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url)
    try:
        port_is_fine = parts.port != 0
    except ValueError:
        port_is_fine = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine or parts.query or parts.fragment:
        raise ConfigError(f"--{name}: {url!r} is no address of a server; write one like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds after which an upstream has failed.

    Attributes:
        connect: until it takes the connection.
        first_byte: until the first event of a stream.
        idle: between two pieces of a stream.
        total: of an answer, and of a client that does not read.
    """

    connect: float = 5.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')}-timeout must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """A rollout, and how requests are passed on.

    Attributes:
        stable, candidate: base URLs.
        steps: shares of the candidate from 0 to 1, rising.
        hold: seconds that each step lasts at least.
        gates: what the candidate must keep to.
        window: seconds that gates look back.
        min_samples: requests of the candidate in the window that it takes to judge.
        false_rollback: bound on the probability that a rollout of a candidate that keeps to its gates is rolled back.
        false_pass: bound on the probability that a candidate that violates a gate gets past a step.
        promote_undecided: promote on estimates once the hold is over, without certainty.
        shadow: copies go to the candidate and clients are answered by stable.
        adapter: name of the stable side's adapter, if it is not OpenAI-shaped.
        session: which requests belong together.
        timeouts: see there.
        stable_key, candidate_key: put in the place of the client's ``Authorization``, if given.
        health_path: answers with a status below 500 while a server is well.
        health_interval: seconds between two probes.
        down_after: seconds without a single success after which a candidate counts as down.
        max_body_bytes: of a request; larger ones are refused.
        drain_timeout: seconds that open answers get to end when the router is told to stop.
        state_file: where the rollout survives a restart.
    """

    stable: str
    candidate: str
    steps: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    hold: float = 300.0
    gates: tuple[Gate, ...] = field(default_factory=lambda: parse_gates(EXAMPLE))
    window: float = 300.0
    min_samples: int = 20
    false_rollback: float = 0.01
    false_pass: float = 0.05
    promote_undecided: bool = False
    shadow: bool = False
    adapter: str | None = None
    session: SessionRule = field(default_factory=SessionRule)
    timeouts: Timeouts = field(default_factory=Timeouts)
    stable_key: str | None = None
    candidate_key: str | None = None
    health_path: str = "/health"
    health_interval: float = 5.0
    down_after: float = 15.0
    max_body_bytes: int = 4 * 1024**2
    drain_timeout: float = 30.0
    state_file: Path | None = None

    def __post_init__(self) -> None:
        if self.stable == self.candidate:
            raise ConfigError("--stable and --candidate are the same address; give two servers")
        for name in ("false_rollback", "false_pass"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is a probability; it must lie between 0 and 1")
        for name in ("hold", "window", "health_interval", "down_after", "drain_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
        if self.min_samples < 1 or self.max_body_bytes < 1:
            raise ConfigError("--min-samples and --max-body must be at least 1")
        if not self.health_path.startswith("/"):
            raise ConfigError(f"--health-path must begin with a slash, such as /health, not {self.health_path!r}")

    @property
    def identity(self) -> dict[str, object]:
        """What a saved state belongs to, as JSON."""
        return {
            "stable": self.stable,
            "candidate": self.candidate,
            "steps": [round(step * 100, 6) for step in self.steps],
            "gates": [gate.text for gate in self.gates],
            "shadow": self.shadow,
        }
