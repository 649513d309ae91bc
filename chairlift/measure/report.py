"""The comparison as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from importlib import resources

from chairlift import __version__
from chairlift.measure import pictures
from chairlift.measure.compare import Comparison, PolicyResult
from chairlift.measure.definitions import DEFINITIONS, OVER, show
from chairlift.measure.metrics import find_batches
from chairlift.measure.table import percent, unit
from chairlift.measure.timeline import KINDS

KIND_WORDS = {
    "waiting": "waiting",
    "prefill": "prompt computed",
    "decode": "generating",
    "padding": "padding computed",
    "ended": "ended, computed on for nobody",
    "recomputed": "computed again after a preemption",
}


def html_report(comparison: Comparison) -> str:
    """The whole document."""
    workload = comparison.workload
    title = f"{workload.name}: static against continuous batching"
    css = resources.files("chairlift.measure").joinpath("report.css").read_text("utf-8")
    body = "\n".join(part for section in _sections(comparison) for part in section)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="dim">{escape(_circumstances(comparison))}</p>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _circumstances(comparison: Comparison) -> str:
    capacity, workload = comparison.capacity, comparison.workload
    model = (
        f"{capacity.model or 'a model'} in {capacity.dtype or 'its own precision'} on {capacity.device or 'a device'}"
    )
    repeats = len(comparison.continuous.runs)
    return (
        f"{len(workload.requests)} requests, {workload.prompt_tokens:,} prompt tokens and {workload.output_tokens:,} "
        f"generated, seed {comparison.seed}; {model}, {capacity.num_token_slots:,} tokens of KV cache; "
        f"{repeats} run{'s' if repeats > 1 else ''} of each policy; chairlift {__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}."
    )


def _sections(comparison: Comparison) -> Iterator[Iterator[str]]:
    yield _summary(comparison)
    yield _timeline(comparison)
    if len(comparison.workload.requests) <= pictures.MOST_NAMED:
        yield _steps(comparison)
    else:
        yield _figure(
            "Sequences in each step",
            pictures.occupancy(comparison),
            "How many sequences each step computed over time (line), and how many of them somebody waited for (area). "
            "The gap is rows of sequences that had ended.",
        )
    yield _figure(
        "KV memory",
        pictures.memory(comparison),
        "Tokens that the blocks owned by requests can hold (line), and those of them computed and still needed (area).",
    )
    yield _figure(
        "Latency",
        pictures.latencies(comparison),
        "Share of requests whose answer, and whose first token, has come within a time. All repeats together.",
    )
    yield _table(comparison)
    yield _definitions(comparison)


def _summary(comparison: Comparison) -> Iterator[str]:
    yield f"<p>{escape(comparison.workload.description)}</p>"
    for verdict in comparison.verdicts():
        yield f'<p class="verdict">{escape(verdict)}</p>'


def _timeline(comparison: Comparison) -> Iterator[str]:
    yield from _figure(
        "Who held which place of the batch",
        pictures.timeline(comparison),
        "One lane for each place, one panel for each policy, one time axis. An empty stretch is a place that nobody "
        "held. The run drawn is the one of median duration.",
        _key(),
    )


def _key() -> str:
    items = "".join(f'<li><span style="background:var(--{k})"></span>{KIND_WORDS[k]}</li>' for k in KINDS)
    return f'<ul class="key">{items}</ul>'


def _steps(comparison: Comparison) -> Iterator[str]:
    words = [
        f"{result.policy.name}, {', '.join(batch.requests)}: {batch.generating_steps} generating steps, "
        f"{batch.row_steps} row-steps, {batch.wasted_row_steps} of them wasted."
        for result in comparison.results
        for batch in find_batches(result.typical_run.steps)
    ]
    yield from _figure(
        "Step by step",
        pictures.step_grid(comparison),
        "What each request had in every step, by the step's number. A row-step is the place of one sequence in one "
        "step that generates. " + " ".join(words),
    )


def _figure(heading: str, svg: str, caption: str, key: str = "") -> Iterator[str]:
    yield f"<section>\n<h2>{escape(heading)}</h2>\n{key}"
    yield f'<figure role="img" aria-label="{escape(heading)}. {escape(caption)}">\n{svg}</figure>'
    yield f'<p class="dim">{escape(caption)}</p>\n</section>'


def _table(comparison: Comparison) -> Iterator[str]:
    yield '<section>\n<h2>All numbers</h2>\n<div class="scroll" tabindex="0" role="region" aria-label="All numbers">'
    yield '<table>\n<thead><tr><th scope="col">Number</th>'
    yield f'<th scope="col">{comparison.continuous.policy.name}</th>'
    for baseline in comparison.baselines:
        yield f'<th scope="col">{baseline.policy.name}</th><th scope="col">change from it</th>'
    yield "</tr></thead>\n<tbody>"
    for key in comparison.shown:
        definition = DEFINITIONS[key]
        cells = _cell(comparison.continuous, key)
        for baseline in comparison.baselines:
            change = comparison.change(baseline, key)
            tone = _tone(change, definition.better)
            cells += f"{_cell(baseline, key)}<td{tone}>{percent(change)}</td>"
        yield f'<tr><th scope="row">{escape(definition.label)} {unit(key)}</th>{cells}</tr>'
    yield f'</tbody></table>\n</div>\n<p class="dim">{escape(OVER)}</p>\n</section>'


def _cell(result: PolicyResult, key: str) -> str:
    median, values = result.median(key), result.values(key)
    if median is None:
        return "<td>–</td>"
    low, high = show(key, min(values)), show(key, max(values))
    return f"<td>{show(key, median)}{f' <small>[{low}–{high}]</small>' if low != high else ''}</td>"


def _tone(change: float | None, better: int) -> str:
    if change is None or not better or abs(change) < 1:
        return ""
    return ' class="good"' if change * better > 0 else ' class="bad"'


def _definitions(comparison: Comparison) -> Iterator[str]:
    yield "<section>\n<h2>How each number is defined</h2>\n<dl>"
    for key in comparison.shown:
        definition = DEFINITIONS[key]
        yield f"<dt>{escape(definition.label.strip())}</dt><dd>{escape(definition.text)}</dd>"
    yield "</dl>\n</section>"
