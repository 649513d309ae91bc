"""The numbers of a report, as pure functions of what a run left behind. Names are those of ``vllm bench serve``.

Latencies are in milliseconds, rates in events a second, shares from 0 to 1. Means and percentiles of TTFT, TPOT and
E2E latency are over requests; those of ITL are over all gaps of all requests. A percentile lies, where it falls between
two values, on the line between them (NumPy's default).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.measure.records import RequestRecord, Run, StepDetail

Metrics = dict[str, float]

SLO_NAMES = ("ttft", "tpot", "e2el")
PERCENTILES = (50.0, 99.0)


def parse_goodput(items: Iterable[str]) -> dict[str, float]:
    """Reads service level objectives, such as ``ttft:500 tpot:50 e2el:2000`` (milliseconds).

    Raises:
        ValueError: an item is not ``NAME:MILLISECONDS`` with a known name and a number of at least 0.
    """
    slos: dict[str, float] = {}
    for item in " ".join(items).split():
        name, _, text = item.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in SLO_NAMES or not limit >= 0:
            raise ValueError(f"{item!r} is no objective: write NAME:MILLISECONDS with one of {', '.join(SLO_NAMES)}")
        slos[name] = limit
    return slos


def meets(request: RequestRecord, slos: Mapping[str, float]) -> bool:
    """Whether a request meets all objectives. An answer of one token has no TPOT to miss; a failure meets none."""
    if request.error is not None or not request.token_times:
        return False
    taken = {"ttft": request.ttft, "tpot": request.tpot or 0.0, "e2el": request.e2el}
    return all(taken[name] * 1000 <= limit for name, limit in slos.items())


def request_metrics(
    requests: Sequence[RequestRecord],
    duration: float,
    slos: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> Metrics:
    """Throughput and latencies. Failed requests are counted and in none of the others. Without any success, no latency.

    Args:
        requests: all that were sent.
        duration: seconds from the first send to the last end.
        slos: objectives in milliseconds; with any, ``request_goodput`` is given.
        percentiles: which ones; 50 is called the median.
    """
    if not duration > 0:
        raise ValueError(f"a run takes time, got {duration} seconds")
    done = [request for request in requests if request.error is None]
    metrics: Metrics = {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": sum(request.prompt_tokens for request in done),
        "total_output_tokens": sum(request.output_tokens for request in done),
    }
    metrics["request_throughput"] = metrics["completed"] / duration
    metrics["output_throughput"] = metrics["total_output_tokens"] / duration
    metrics["total_token_throughput"] = (metrics["total_input_tokens"] + metrics["total_output_tokens"]) / duration
    if slos:
        metrics["request_goodput"] = sum(meets(request, slos) for request in done) / duration
    answered = [request for request in done if request.token_times]
    tpots = [request.tpot for request in answered if request.tpot is not None]
    metrics |= spread("ttft_ms", [request.ttft for request in answered], percentiles)
    metrics |= spread("tpot_ms", tpots, percentiles)
    metrics |= spread("itl_ms", [gap for request in answered for gap in request.itls], percentiles)
    metrics |= spread("e2el_ms", [request.e2el for request in answered], percentiles)
    queued = [request.started - request.sent for request in done if request.started is not None]
    return metrics | spread("queue_ms", queued, percentiles)


def spread(name: str, seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Metrics:
    """Mean, standard deviation and percentiles in milliseconds; nothing where there are no values."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1000
    metrics = {f"mean_{name}": float(values.mean()), f"std_{name}": float(values.std())}
    for percentile in percentiles:
        label = "median" if percentile == 50 else f"p{percentile:g}"
        metrics[f"{label}_{name}"] = float(np.percentile(values, percentile))
    return metrics


@dataclass(frozen=True, slots=True)
class UsefulWork:
    """What MFU needs to know of a model and its device.

    Attributes:
        flops_per_row: of one token through all layers, without attention and without the output head.
        flops_per_token: of the output head, once for each token that is sampled.
        peak: FLOPs a second of the device's matrix products, as measured.
    """

    flops_per_row: float
    flops_per_token: float
    peak: float


def step_metrics(steps: Sequence[StepDetail], duration: float, work: UsefulWork | None = None) -> Metrics:
    """How the device's time and memory were spent.

    ``device_busy`` is the share of ``duration`` inside forward passes, ``useful_share`` that of the token rows which
    a client receives or a prompt needed once, and ``effective_utilisation`` their product. KV memory is averaged over
    the time inside steps: ``kv_reserved_tokens`` are what the blocks owned by requests can hold, ``kv_used_tokens``
    those of them that are computed and still needed.
    """
    busy = sum(step.record.elapsed for step in steps)
    rows = {
        kind: sum(getattr(step.record.rows, kind) for step in steps)
        for kind in ("prefill", "decode", "recomputed", "padding", "ended")
    }
    total = sum(rows.values())
    useful = rows["prefill"] + rows["decode"]
    metrics: Metrics = {
        "steps": len(steps),
        "device_busy": busy / duration,
        "useful_share": useful / total,
        "effective_utilisation": busy / duration * useful / total,
        "rows_total": total,
        **{f"rows_{kind}": count for kind, count in rows.items()},
        "rows_wasted": total - useful,
        "preemptions": sum(step.record.preempted for step in steps),
        "max_running": max(len(step.work) for step in steps),
        "mean_step_ms": busy / len(steps) * 1000,
    }
    if busy:
        metrics["kv_reserved_tokens"] = sum(step.kv_reserved * step.record.elapsed for step in steps) / busy
        metrics["kv_used_tokens"] = sum(step.kv_used * step.record.elapsed for step in steps) / busy
        metrics["kv_used_share"] = metrics["kv_used_tokens"] / metrics["kv_reserved_tokens"]
    if work is not None:
        sampled = sum(item.sampled and not item.ended for step in steps for item in step.work)
        flops = useful * work.flops_per_row + sampled * work.flops_per_token
        metrics["mfu"] = flops / duration / work.peak
    return metrics


def run_metrics(run: Run, slos: Mapping[str, float] | None = None, work: UsefulWork | None = None) -> Metrics:
    """All numbers of one run."""
    return request_metrics(run.requests, run.duration, slos) | step_metrics(run.steps, run.duration, work)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that share steps, from a step that has none of those before it up to the next such step.

    Under static batching these are the batches. Under continuous batching one goes on for as long as there is work.

    Attributes:
        requests: names, in the order in which they came in.
        steps: forward passes.
        generating_steps: those that sampled a token for anyone.
        row_steps: sequences in those steps, summed: the places that were computed.
        wasted_row_steps: those of a sequence that had already ended.
    """

    requests: Sequence[str]
    steps: int
    generating_steps: int
    row_steps: int
    wasted_row_steps: int


def find_batches(steps: Iterable[StepDetail]) -> list[Batch]:
    """Cuts the steps of a run into batches."""
    groups: list[list[StepDetail]] = []
    previous: set[str] = set()
    for step in steps:
        names = {item.name for item in step.work}
        if groups and names & previous:
            groups[-1].append(step)
        else:
            groups.append([step])
        previous = names
    return [_batch(group) for group in groups]


def _batch(steps: Sequence[StepDetail]) -> Batch:
    generating = [step for step in steps if any(item.sampled for item in step.work)]
    # A sequence takes part in a generating step if it samples. One that is still prefilling beside it has a place too,
    # but no token yet to be late with: the prefill step that yields its first token is its first row-step.
    rows = [item for step in generating for item in step.work if item.sampled]
    return Batch(
        tuple(dict.fromkeys(item.name for step in steps for item in step.work)),
        len(steps),
        len(generating),
        len(rows),
        sum(item.ended for item in rows),
    )
