"""The pictures of the report, as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from chairlift.measure.compare import Comparison, PolicyResult
from chairlift.measure.records import Run, StepDetail
from chairlift.measure.timeline import KINDS, Span, find_spans

WIDTH = 10.0  # inches; the page stretches the picture to its own width
MOST_POINTS = 600
MOST_NAMED = 12  # requests that can be told apart by name in a picture

# Stand-ins that matplotlib writes into the SVG, each replaced by a variable of the page's style sheet.
INK, GRID, NONE = "#010101", "#010102", "none"
KIND_COLORS = {kind: f"#0102{index:02x}" for index, kind in enumerate(KINDS)}
LINE_COLORS = [f"#0103{index:02x}" for index in range(8)]
CONTINUOUS_COLOR = "#010500"
ON_COLOR = "#010401"
VARIABLES = {
    INK: "ink",
    GRID: "grid",
    ON_COLOR: "on-color",
    CONTINUOUS_COLOR: "line-continuous",
    **{color: kind for kind, color in KIND_COLORS.items()},
    **{color: f"line-{index}" for index, color in enumerate(LINE_COLORS)},
}
STYLE: Any = {  # matplotlib's own type for it names every key there is
    "svg.fonttype": "none",
    "svg.hashsalt": "chairlift",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": NONE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "figure.facecolor": NONE,
    "legend.frameon": False,
    "path.simplify": True,
}


def timeline(comparison: Comparison) -> str:
    """A lane for each place of the batch, one panel for each policy, all on one time axis; those who wait below."""
    results = comparison.results
    panels = [(result, find_spans(result.typical_run, result.policy.size)) for result in results]
    named = len(comparison.workload.requests) <= MOST_NAMED
    queues = [len(_waiting_names(result, spans)) if named else 8 for result, spans in panels]
    heights = [result.policy.size + queue + 3 for (result, _), queue in zip(panels, queues, strict=True)]
    with mpl.rc_context(STYLE):
        lane_inches = 0.28 if named else 0.15
        figure = Figure(figsize=(WIDTH, sum(heights) * lane_inches + 0.6), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (result, spans) in zip(axes, panels, strict=True):
            _draw_lanes(axis, result, spans, named)
        axes[-1].set_xlabel("seconds after the start")
        axes[-1].set_xlim(0, max(result.typical_run.duration for result in results))
        return _svg(figure, "timeline")


def _draw_lanes(axis: Axes, result: PolicyResult, spans: Sequence[Span], named: bool) -> None:
    slots = result.policy.size
    for kind in KINDS:
        if kind == "waiting":
            continue
        for lane in range(slots):
            bars = [(s.start, s.end - s.start) for s in spans if s.lane == lane and s.kind == kind]
            if bars:
                axis.broken_barh(bars, (lane - 0.42, 0.84), facecolors=KIND_COLORS[kind], linewidth=0)
    ticks, labels = list(range(slots)), [f"{lane + 1}" for lane in range(slots)]
    bottom = slots
    if named:
        for name in _waiting_names(result, spans):
            waits = [(s.start, s.end - s.start) for s in spans if s.name == name and s.lane < 0]
            axis.broken_barh(waits, (bottom - 0.42, 0.84), facecolors=KIND_COLORS["waiting"], linewidth=0)
            ticks.append(bottom)
            labels.append(f"{name} waits")
            bottom += 1
        _name_requests(axis, spans)
    else:
        _draw_queue(axis, spans, slots + 0.5)
        ticks = [lane for lane in ticks if lane % 4 == 3 or lane == 0]
        labels = [labels[lane] for lane in ticks]
        bottom += 8
    axis.set_yticks(ticks, labels)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(bottom - 0.4, -0.6)
    axis.set_title(f"{result.policy.name}: {slots} places")
    axis.set_gid(f"lanes-{result.policy.name}-{slots}")


def _waiting_names(result: PolicyResult, spans: Sequence[Span]) -> list[str]:
    """Who waits long enough to be seen."""
    least = result.typical_run.duration / 200
    return list(dict.fromkeys(s.name for s in spans if s.lane < 0 and s.end - s.start > least))


def _name_requests(axis: Axes, spans: Sequence[Span]) -> None:
    for name in dict.fromkeys(s.name for s in spans):
        held = [s for s in spans if s.name == name and s.lane >= 0]
        longest = max(held, key=lambda s: s.end - s.start)
        axis.text(
            (longest.start + longest.end) / 2,
            longest.lane,
            name,
            ha="center",
            va="center",
            color=ON_COLOR,
            weight="bold",
        )


def _draw_queue(axis: Axes, spans: Sequence[Span], top: float) -> None:
    """How many wait, as an area that hangs below the lanes."""
    waits = [s for s in spans if s.lane < 0 and s.end > s.start]
    moves = sorted([(s.start, 1) for s in waits] + [(s.end, -1) for s in waits])
    if not moves:
        return
    times, counts = np.array([t for t, _ in moves]), np.cumsum([step for _, step in moves])
    most = int(counts.max())
    axis.fill_between(times, top, top + counts * (7.0 / most), step="post", color=KIND_COLORS["waiting"], linewidth=0)
    axis.text(0.995, 0.02, f"waiting, at most {most}", transform=axis.transAxes, ha="right", va="bottom")


def step_grid(comparison: Comparison) -> str:
    """For a few requests: what each of them had in every generating step, useful or not, by the step's number."""
    panels = [(result, find_spans(result.typical_run, result.policy.size)) for result in comparison.results]
    names = [request.name for request in comparison.workload.requests]
    with mpl.rc_context(STYLE):
        height = (len(names) * 0.28 + 0.7) * len(panels) + 0.5
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (result, spans) in zip(axes, panels, strict=True):
            for row, name in enumerate(names):
                _draw_steps(axis, result.typical_run, [s for s in spans if s.name == name], row)
            axis.set_yticks(range(len(names)), names)
            axis.tick_params(axis="y", length=0)
            axis.set_ylim(len(names) - 0.5, -0.6)
            axis.set_title(result.policy.name)
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlim(0, max(len(result.typical_run.steps) for result, _ in panels))
        return _svg(figure, "steps")


def _draw_steps(axis: Axes, run: Run, spans: Sequence[Span], row: int) -> None:
    began = min(s.first_step for s in spans if s.lane >= 0)
    if began and any(s.lane < 0 and s.end > s.start for s in spans):
        axis.broken_barh([(0, began)], (row - 0.3, 0.6), facecolors=KIND_COLORS["waiting"], linewidth=0)
    for span in spans:
        if span.lane >= 0:
            width = span.last_step + 1 - span.first_step
            color = KIND_COLORS[span.kind]
            axis.broken_barh([(span.first_step, width)], (row - 0.42, 0.84), facecolors=color, linewidth=0)
    useful = sum(not item.ended for step in run.steps for item in step.work if item.name == spans[0].name)
    end = max(s.last_step for s in spans) + 1
    axis.text(end, row, f" {useful} steps of use", va="center", size=8)


def memory(comparison: Comparison) -> str:
    """KV memory over time: what requests own as a line, and what of it they use as the area below."""

    def draw(axis: Axes, color: str, result: PolicyResult) -> None:
        steps = _thinned(result.typical_run)
        times = [step.record.time for step in steps]
        axis.step(times, [step.kv_reserved for step in steps], where="post", color=color, linewidth=1.4)
        used = [step.kv_used for step in steps]
        axis.fill_between(times, used, step="post", color=color, alpha=0.35, linewidth=0)
        axis.set_title(f"{result.policy.name}: line owned, area in use")

    return _panels(comparison, draw, "KV tokens", "memory")


def occupancy(comparison: Comparison) -> str:
    """Sequences in each step over time, and of them those that somebody waits for."""

    def draw(axis: Axes, color: str, result: PolicyResult) -> None:
        steps = _thinned(result.typical_run)
        times = [step.record.time for step in steps]
        counts = [len(step.work) for step in steps]
        wanted = [sum(not item.ended for item in step.work) for step in steps]
        axis.step(times, counts, where="post", color=color, linewidth=1.2)
        axis.fill_between(times, wanted, step="post", color=color, alpha=0.35, linewidth=0)
        axis.set_title(f"{result.policy.name}: line computed, area wanted by a client")

    return _panels(comparison, draw, "sequences", "occupancy")


def _panels(comparison: Comparison, draw: Callable[[Axes, str, PolicyResult], None], label: str, name: str) -> str:
    results = comparison.results
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.5 * len(results) + 0.4), layout="constrained")
        axes = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axis, result, color in zip(axes, results, _colors(comparison), strict=True):
            draw(axis, color, result)
            axis.set_ylabel(label)
            axis.grid(axis="y", linewidth=0.6)
        axes[0].set_ylim(bottom=0)  # shared, and only now are all of them drawn
        axes[-1].set_xlabel("seconds after the start")
        axes[-1].set_xlim(0, max(result.typical_run.duration for result in results))
        return _svg(figure, name)


def latencies(comparison: Comparison) -> str:
    """The share of requests answered within a time, for the whole answer and for its first token; all repeats."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, title in zip(axes, ("E2E latency", "TTFT"), strict=True):
            for result, color in zip(comparison.results, _colors(comparison), strict=True):
                requests = [request for run in result.runs for request in run.requests]
                values = sorted(r.e2el if title == "E2E latency" else r.ttft for r in requests)
                shares = np.arange(1, len(values) + 1) / len(values) * 100
                axis.step([0, *values], [0, *shares], where="post", color=color, label=result.policy.name)
            axis.set_title(title)
            axis.set_xlabel("seconds")
            axis.set_xlim(left=0)
            axis.set_ylim(0, 101)
            axis.grid(linewidth=0.6)
        axes[0].set_ylabel("% of requests")
        axes[1].legend(loc="lower right")
        return _svg(figure, "latencies")


def _colors(comparison: Comparison) -> list[str]:
    """One for each policy; the continuous one has the same everywhere."""
    return [*(LINE_COLORS[index % len(LINE_COLORS)] for index in range(len(comparison.baselines))), CONTINUOUS_COLOR]


def _thinned(run: Run) -> Sequence[StepDetail]:
    return run.steps[:: -(-len(run.steps) // MOST_POINTS)]


def _svg(figure: Figure, name: str) -> str:
    """The picture as an SVG element whose ids begin with ``name`` and whose colours are the page's variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    return re.sub(r"#01[0-9a-f]{4}", lambda match: f"var(--{VARIABLES[match.group()]})", svg)
