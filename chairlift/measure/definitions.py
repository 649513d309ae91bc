"""How each number is called, which way is better, and what it means: one text for table, report and documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """One number of a report.

    Attributes:
        label: for people.
        unit: "ms", "/s", "%" (of a share from 0 to 1), "tokens", "rows", "steps", "s" or "".
        better: 1 if more is better, -1 if less is, 0 if neither.
        text: what it is, in one sentence.
    """

    label: str
    unit: str
    better: int
    text: str


def _latency(key: str, name: str, text: str) -> dict[str, Definition]:
    return {
        f"mean_{key}": Definition(f"{name}, mean", "ms", -1, text),
        f"median_{key}": Definition(f"{name}, P50", "ms", -1, f"Median of the same. {text}"),
        f"p99_{key}": Definition(f"{name}, P99", "ms", -1, f"99th percentile of the same. {text}"),
    }


DEFINITIONS: dict[str, Definition] = {
    "device_busy": Definition("Device busy", "%", 1, "Share of the run's time inside a forward pass."),
    "useful_share": Definition(
        "Useful share",
        "%",
        1,
        "Of the token rows computed, those that a client receives or that a prompt needed once. Padding, rows of ended "
        "sequences and tokens computed again after a preemption are waste.",
    ),
    "effective_utilisation": Definition("Effective utilisation", "%", 1, "Device busy × useful share."),
    "mfu": Definition(
        "Model FLOPs utilisation",
        "%",
        1,
        "Useful floating-point operations (2 × weights for each useful row, the output head once for each token "
        "received; attention is left out) over the run's time × the matrix peak given.",
    ),
    **_latency("e2el_ms", "E2E latency", "From send to the end of the answer, over all answered requests."),
    **_latency(
        "ttft_ms",
        "TTFT",
        "From send to the first token that the client has, over all answered requests. Static batching hands out whole "
        "answers, so its first token comes with the last.",
    ),
    **_latency(
        "tpot_ms",
        "TPOT",
        "(E2E − TTFT)/(n − 1) of each request with n > 1 tokens. It is 0 where an answer comes whole.",
    ),
    **_latency("itl_ms", "ITL", "Every gap between two tokens, over all gaps of all requests."),
    "output_throughput": Definition("Output tokens", "/s", 1, "Tokens generated for clients, over the run's time."),
    "total_token_throughput": Definition(
        "Total tokens", "/s", 1, "Prompt tokens and tokens generated for clients, over the run's time."
    ),
    "request_throughput": Definition("Requests", "/s", 1, "Requests answered, over the run's time."),
    "request_goodput": Definition("Goodput", "/s", 1, "Requests that meet all objectives, over the run's time."),
    "mean_queue_ms": Definition(
        "Queueing, mean", "ms", -1, "From send until the engine first plans the request, over all answered requests."
    ),
    "rows_total": Definition("Rows computed", "rows", -1, "Token rows in all forward passes."),
    "rows_padding": Definition(
        "  wasted: padding", "rows", -1, "Rows that fill prompts up to the longest one of a static batch."
    ),
    "rows_ended": Definition(
        "  wasted: ended", "rows", -1, "Rows of sequences that have ended, computed until their static batch has."
    ),
    "rows_recomputed": Definition(
        "  wasted: recomputed", "rows", -1, "Rows computed before, whose keys and values a preemption threw away."
    ),
    "kv_reserved_tokens": Definition(
        "KV reserved", "tokens", -1, "Tokens that the blocks owned by requests can hold, averaged over step time."
    ),
    "kv_used_tokens": Definition(
        "KV used", "tokens", 0, "Those of them that are computed and that a request still needs, averaged the same way."
    ),
    "kv_used_share": Definition("KV used of reserved", "%", 1, "The second over the first."),
    "steps": Definition("Steps", "steps", 0, "Forward passes."),
    "mean_step_ms": Definition("Step, mean", "ms", 0, "Time inside a forward pass."),
    "max_running": Definition("Most sequences in a step", "", 0, "Of all steps."),
    "preemptions": Definition("Preemptions", "", -1, "How often a request was put aside for want of KV memory."),
    "duration": Definition("Duration", "s", -1, "From the start to the end of the last answer."),
}

OVER = (
    "Means and percentiles of E2E latency, TTFT and TPOT are over the requests of one run, those of ITL over all gaps "
    "of all its requests. Each number is then the median over the repeats, with the lowest and highest in brackets."
)


def show(key: str, value: float) -> str:
    """A value with about three digits, in its unit but without naming it."""
    if DEFINITIONS[key].unit == "%":
        return f"{value * 100:.1f}"
    if DEFINITIONS[key].unit in ("", "rows", "steps") and value == int(value):
        return f"{value:,.0f}"
    if value and abs(value) < 9.995:
        return f"{value:.2f}"
    return f"{value:,.1f}" if abs(value) < 99.95 and value != int(value) else f"{value:,.0f}"
