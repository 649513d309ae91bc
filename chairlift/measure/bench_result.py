"""The result of a load as JSON, under the keys of ``vllm bench serve``, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.table import Table

from chairlift.measure.loadgen import Load
from chairlift.measure.metrics import Metrics, request_metrics, spread

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency", "client_queue": "Client's own queue"}
OVER = "TTFT, TPOT and E2E latency are over answered requests, ITL over all gaps between pieces of all of them."


def load_metrics(load: Load, slos: Mapping[str, float], percentiles: Sequence[float]) -> Metrics:
    """All numbers of a load. The client's own queue is over all requests, answered or not."""
    if not load.records:
        return {"duration": 0.0, "completed": 0, "failed": 0}
    metrics = request_metrics(load.records, load.duration, slos, percentiles)
    waits = [record.client_wait for record in load.records]
    return metrics | spread("client_queue_ms", waits, percentiles) | {"max_concurrent_requests": load.most_open}


def result_json(load: Load, metrics: Metrics, settings: Mapping[str, Any], *, detailed: bool) -> dict[str, Any]:
    """The JSON object: settings, then numbers, then with ``detailed`` lists with an entry for each request."""
    result: dict[str, Any] = {
        "date": f"{datetime.now().astimezone():%Y%m%d-%H%M%S}",
        **settings,
        **metrics,
        "error_counts": _count_errors(load),
        "ended_early": load.gave_up,
    }
    if detailed:
        result |= {
            "input_lens": [record.prompt_tokens for record in load.records],
            "output_lens": [record.output_tokens for record in load.records],
            "start_times": [record.sent for record in load.records],
            "client_queues": [record.client_wait for record in load.records],
            "ttfts": [record.ttft if record.token_times else 0.0 for record in load.records],
            "itls": [record.itls for record in load.records],
            "e2els": [record.e2el for record in load.records],
            "generated_texts": load.texts,
            "errors": [record.error or "" for record in load.records],
        }
    return result


def _count_errors(load: Load) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in load.records:
        if record.error is not None:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def result_table(metrics: Metrics, shown: Sequence[str], percentiles: Sequence[float]) -> Table:
    """The numbers for people."""
    table = Table(title="Serving benchmark", title_justify="left", show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    counts = {
        "Requests answered": "completed",
        "Requests failed": "failed",
        "Most open at once": "max_concurrent_requests",
        "Duration (s)": "duration",
        "Prompt tokens": "total_input_tokens",
        "Output tokens": "total_output_tokens",
        "Requests (/s)": "request_throughput",
        "Goodput (/s)": "request_goodput",
        "Output tokens (/s)": "output_throughput",
        "Total tokens (/s)": "total_token_throughput",
    }
    for label, key in counts.items():
        if key in metrics:
            table.add_row(label, _number(metrics[key]))
    for name in shown:
        labels = ["mean", *("median" if p == 50 else f"p{p:g}" for p in percentiles)]
        for label in labels:
            if f"{label}_{name}_ms" in metrics:
                title = {"mean": "mean", "median": "P50"}.get(label, label.upper())
                table.add_row(f"{LATENCIES[name]}, {title} (ms)", _number(metrics[f"{label}_{name}_ms"]))
    return table


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
