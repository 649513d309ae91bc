"""The arithmetic of the comparison with peers, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS = "chairlift"
Values = Sequence[float | None]


class Scenario(NamedTuple):
    """What is measured: its title, the unit of its figures, and whether more of it is better."""

    title: str
    unit: str
    more_is_better: bool


SCENARIOS = {
    "set": Scenario("the request set, all at once", "total tokens/s", True),
    "b1": Scenario("one sequence, prompt 32, 128 new tokens", "tokens/s", True),
    "example": Scenario("worked example A to F, four at a time", "seconds", False),
}


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and the range in brackets."""
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def speed_ratios(ours: Values, theirs: Values, more_is_better: bool) -> list[float]:
    """How many times as fast we were in each round in which both have a figure."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return [a / b if more_is_better else b / a for a, b in pairs]


def decode_rate(tokens: int, whole: float, first: float) -> float | None:
    """Tokens a second after the first, from the seconds that ``tokens`` tokens and that one token took.

    ``None`` where noise made the one take as long as the many.
    """
    return (tokens - 1) / (whole - first) if whole > first else None


def present(values: Values) -> list[float]:
    """The rounds that have a figure."""
    return [value for value in values if value is not None]


def best_peer(figures: Mapping[str, Values], precision: str, more_is_better: bool) -> str | None:
    """The peer ("name precision") with the best median among those of one precision."""
    medians = {
        label: statistics.median(present(values))
        for label, values in figures.items()
        if label.split()[1] == precision and not label.startswith(OURS) and present(values)
    }
    if not medians:
        return None
    return (max if more_is_better else min)(medians, key=lambda label: medians[label])


def table(
    scenario: Scenario, figures: Mapping[str, Values], shares: Mapping[str, Sequence[float]], share_title: str
) -> str:
    """One scenario in Markdown: a row for each engine and precision, best first, and the ratio to ours.

    Args:
        scenario: which.
        figures: of each "name precision", one for each round.
        shares: of the machine's ceiling, from 0 to 1, where they are known.
        share_title: what they are shares of; no such column if empty.
    """
    head = ["engine", scenario.unit, f"{OURS} is so many times as fast", *([share_title] if share_title else [])]
    digits = 1 if scenario.more_is_better else 2
    rows = []
    known = {label: present(values) for label, values in figures.items() if present(values)}
    for label in sorted(known, key=lambda key: statistics.median(known[key]), reverse=scenario.more_is_better):
        ours = f"{OURS} {label.split()[1]}"
        ratios = speed_ratios(figures.get(ours, ()), figures[label], scenario.more_is_better) if ours in known else []
        row = [label, spread(known[label], digits), spread(ratios, 2) if ratios and label != ours else "–"]
        if share_title:
            row.append(spread([100 * share for share in shares[label]], 0) + " %" if label in shares else "–")
        rows.append(row)
    lines = [f"### {scenario.title}", "", *(_line(row) for row in (head, ["---"] * len(head), *rows))]
    return "\n".join([*lines, "", *_verdicts(scenario, figures)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _verdicts(scenario: Scenario, figures: Mapping[str, Values]) -> list[str]:
    """A line for each precision against its best peer, and one for each other precision of ours against bf16."""
    lines = []
    for precision in sorted({label.split()[1] for label in figures}):
        ours, peer = f"{OURS} {precision}", best_peer(figures, precision, scenario.more_is_better)
        if peer is not None and (ratios := _ratios(figures, ours, peer, scenario)):
            lines.append(f"{ours}: {spread(ratios, 2)} times the best peer, {peer}")
        if precision != "bf16" and (ratios := _ratios(figures, ours, f"{OURS} bf16", scenario)):
            lines.append(f"{ours}: {spread(ratios, 2)} times {OURS} bf16")
    return lines


def _ratios(figures: Mapping[str, Values], ours: str, other: str, scenario: Scenario) -> list[float]:
    if ours not in figures or other not in figures:
        return []
    return speed_ratios(figures[ours], figures[other], scenario.more_is_better)


def same_first_tokens(ours: Sequence[int | None], theirs: Sequence[int | None]) -> tuple[int, int]:
    """How many first tokens are equal, of how many that both tell: a check that both run the same model."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return sum(a == b for a, b in pairs), len(pairs)


def engine_table(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """What ran: version and tuning, start-up, and what it used while it should have been idle."""
    head = ["engine", "what it is", "start-up s", "cores busy when idle", "first tokens as ours"]
    rows = []
    for label, facts in engines.items():
        same, told = facts.get("same_first_tokens", (0, 0))
        agreement = f"{same} of {told}" if told else "–"
        rows.append([label, facts["description"], f"{facts['start_seconds']:.1f}", f"{facts['idle']:.2f}", agreement])
    return "\n".join(_line(row) for row in (head, ["---"] * len(head), *rows))
