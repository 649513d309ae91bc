"""The comparison as a table on a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from chairlift.measure.compare import Comparison, PolicyResult
from chairlift.measure.definitions import DEFINITIONS, OVER, show


def comparison_table(comparison: Comparison) -> Group:
    """A row for each number; a column for each policy, and beside each static one the change to continuous."""
    workload = comparison.workload
    table = Table(title=f"{workload.name}: {len(workload.requests)} requests", title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column(comparison.continuous.policy.name, justify="right")
    for baseline in comparison.baselines:
        table.add_column(baseline.policy.name, justify="right")
        table.add_column("change", justify="right")
    for key in comparison.shown:
        definition = DEFINITIONS[key]
        cells: list[str | Text] = [cell(comparison.continuous, key)]
        for baseline in comparison.baselines:
            cells += [cell(baseline, key), _colored(comparison.change(baseline, key), definition.better)]
        table.add_row(f"{definition.label} {unit(key)}".rstrip(), *cells)
    lines = [Text(verdict, style="bold") for verdict in comparison.verdicts()]
    return Group(Text(workload.description), table, *lines, Text(OVER, style="dim"))


def unit(key: str) -> str:
    """The unit in brackets, where it has one."""
    name = DEFINITIONS[key].unit
    return f"({name})" if name else ""


def cell(result: PolicyResult, key: str) -> str:
    """The median, and with repeats that differ their range."""
    values, median = result.values(key), result.median(key)
    if median is None:
        return "–"
    low, high = show(key, min(values)), show(key, max(values))
    return show(key, median) + (f" [{low}–{high}]" if low != high else "")


def percent(change: float | None) -> str:
    """A change with its sign."""
    return "" if change is None else f"{change:+,.0f} %" if abs(change) >= 9.95 else f"{change:+.1f} %"


def _colored(change: float | None, better: int) -> Text:
    style = "" if change is None or not better or abs(change) < 1 else "green" if change * better > 0 else "red"
    return Text(percent(change), style=style)
