"""What a candidate must keep to: ``p99_e2e<5s,error_rate<1%,p99_ttft<1s,vs_stable.p99_e2e<1.1``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from chairlift.config import ConfigError

Metric = Literal["e2e", "ttft", "error"]

EXAMPLE = "p99_e2e<5s,error_rate<1%,p99_ttft<1s,vs_stable.p99_e2e<1.1"

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,3})?)_(e2e|ttft)")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|m|%)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition: at most a share of ``allowed`` of the requests may exceed the limit.

    Attributes:
        text: as it was written.
        metric: what of a request is looked at: its whole time, the time to its first token, or whether it failed.
        allowed: 0.01 for a P99, or the error rate itself. Between 0 and 1.
        limit: seconds; for ``error`` no meaning; if ``relative``, a multiple of the stable side's quantile.
        relative: held against the stable side.
    """

    text: str
    metric: Metric
    allowed: float
    limit: float
    relative: bool = False

    @property
    def unit(self) -> str:
        """The unit of the value that the gate bounds: ``s``, ``%`` or ``×``."""
        return "×" if self.relative else "%" if self.metric == "error" else "s"

    @property
    def bound(self) -> float:
        """What the value must stay below, in the gate's unit with a share from 0 to 1 for ``%``."""
        return self.allowed if self.metric == "error" else self.limit

    def show(self, value: float) -> str:
        """Returns a value in the gate's unit, for people."""
        if math.isinf(value):
            return "∞"
        return f"{value * 100:.2f}%" if self.unit == "%" else f"{value:.3g}{self.unit}"


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Reads gates that are separated by commas.

    Raises:
        ConfigError: one of them cannot be read, is there twice, or can never be decided; it says how to write it.
    """
    gates = tuple(_parse(part.strip()) for part in text.split(","))
    names = [(gate.metric, gate.allowed if gate.metric != "error" else 0.0, gate.relative) for gate in gates]
    for gate, name in zip(gates, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"--gate: there are two gates like {gate.text!r}; keep one")
    return gates


def _parse(text: str) -> Gate:
    if not text:
        raise ConfigError(f"--gate: there is an empty gate; write them like {EXAMPLE}")
    name, operator, limit_text = text.partition("<")
    name, limit_text = name.strip(), limit_text.strip()
    if not operator or limit_text.startswith("="):
        raise ConfigError(f"--gate: {text!r} must have the form NAME<LIMIT, such as p99_e2e<5s")
    relative = name.startswith("vs_stable.")
    measure = name.removeprefix("vs_stable.")
    number = _NUMBER.fullmatch(limit_text)
    if number is None:
        raise ConfigError(f"--gate: {text!r}: {limit_text!r} is no limit; write a number with ms, s, m or %")
    value, unit = float(number[1]), number[2]
    if measure == "error_rate":
        return _error_gate(text, relative, value, unit)
    quantile = _QUANTILE.fullmatch(measure)
    if quantile is None:
        raise ConfigError(
            f"--gate: {text!r}: there is no {name!r}; there are error_rate, pNN_e2e and pNN_ttft (such as p50_e2e or "
            "p99.9_ttft), vs_stable.pNN_e2e and vs_stable.pNN_ttft"
        )
    allowed = round(1 - float(quantile[1]) / 100, 9)
    if not 0 < allowed < 1:
        raise ConfigError(f"--gate: {text!r}: there is no p{quantile[1]}; take one above 0 and below 100")
    if relative and unit is not None:
        raise ConfigError(f"--gate: {text!r}: a limit against stable is a bare multiple, such as 1.1")
    if not relative and unit not in _SECONDS:
        raise ConfigError(f"--gate: {text!r}: a latency needs a unit: ms, s or m, such as {number[1]}s")
    limit = value if relative else value * _SECONDS[unit]
    if limit <= 0:
        raise ConfigError(f"--gate: {text!r}: nothing is faster than 0; raise the limit")
    metric: Metric = "e2e" if quantile[2] == "e2e" else "ttft"
    return Gate(text, metric, allowed, limit, relative)


def _error_gate(text: str, relative: bool, value: float, unit: str | None) -> Gate:
    if relative:
        raise ConfigError(
            f"--gate: {text!r}: error rates cannot be held against stable's, which may well be 0; write error_rate<1%"
        )
    if unit != "%":
        raise ConfigError(f"--gate: {text!r}: an error rate is given in percent, such as error_rate<1%")
    if not 0 < value < 100:
        raise ConfigError(
            f"--gate: {text!r}: the limit must lie above 0% and below 100%; no number of requests shows a rate of 0"
        )
    return Gate(text, "error", value / 100, 0.0)
