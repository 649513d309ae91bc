"""The state of a router in a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

STYLES = {"pass": "green", "fail": "red", "undecided": "dim"}
MOST_EVENTS = 6
BAR_WIDTH = 60


def render(status: dict[str, Any]) -> RenderableType:
    """Returns what to show of :func:`chairlift.canary.status.status_of`. Texts in it are shown as they are."""
    steps = ", ".join(_percent(step) for step in status["steps"])
    title = Text(f"chairlift canary · {status['phase'].replace('_', ' ')}", style="bold")
    kind = "copied to" if status["shadow"] is not None else "on"
    share = Text(
        f"{_percent(status['share'])} {kind} the candidate, step {status['step']} of {len(status['steps'])} ({steps}); "
        f"hold: {status['hold_remaining_s']:.0f} s to go; {status['sessions']} sessions"
    )
    parts: list[RenderableType] = [title, _bar(status["share"]), share]
    if status["shadow"] is not None:
        parts.append(Text("copies: " + ", ".join(f"{count} {name}" for name, count in status["shadow"].items())))
    return Group(*parts, _sides(status), _gates(status), _events(status))


def _bar(share: float) -> Text:
    full = round(share * BAR_WIDTH)
    return Text("█" * full, "blue").append("░" * (BAR_WIDTH - full), "dim")


def _sides(status: dict[str, Any]) -> Table:
    table = Table("side", "up", "requests", "errors", "E2E P50", "P99", "TTFT P50", "P99", "open", box=None)
    for name, side in status["sides"].items():
        requests = side["requests"]
        table.add_row(
            Text(f"{name} {side['url']}"),
            Text("yes", "green") if side["up"] else Text("no", "red"),
            str(requests["answered"] + requests["failed"] + requests["client_left"]),
            f"{requests['failed']} ({_percent(side['error_rate'])})",
            *(_seconds(side[f"{p}_{metric}_s"]) for metric in ("e2e", "ttft") for p in ("p50", "p99")),
            str(requests["open"]),
        )
    return table


def _gates(status: dict[str, Any]) -> Table:
    table = Table("gate", "state", "now", box=None)
    for gate in status["gates"]:
        table.add_row(Text(gate["gate"]), Text(gate["verdict"], STYLES[gate["verdict"]]), Text(gate["reason"]))
    return table


def _events(status: dict[str, Any]) -> Table:
    table = Table("when", "what", "share", "by", "why", box=None)
    for event in status["events"][-MOST_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        style = "red" if event["kind"] == "rolled_back" else ""
        what = Text(event["kind"].replace("_", " "), style)
        table.add_row(when, what, _percent(event["share"]), event["by"], Text(event["reason"]))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.3g} %"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
