"""Every number of a report against one worked out by hand."""

from __future__ import annotations

import pytest

from chairlift.measure.metrics import (
    UsefulWork,
    find_batches,
    meets,
    parse_goodput,
    request_metrics,
    step_metrics,
)
from chairlift.measure.records import RequestRecord, SequenceWork, StepDetail
from chairlift.scheduling.plan import RowCounts, StepRecord

# Sent at 1 s, first planned at 1.5 s, tokens at 2, 2.1 and 2.4 s.
FAST = RequestRecord("fast", 10, 3, 1.0, [2.0, 2.1, 2.4], 2.4, started=1.5)
# Sent at 0, planned at once, one token at 4 s.
SINGLE = RequestRecord("single", 30, 1, 0.0, [4.0], 4.0, started=0.0)
FAILED = RequestRecord("failed", 7, 1, 0.0, [1.0], 1.0, error="broke")


def test_latencies_of_one_request() -> None:
    assert FAST.ttft == pytest.approx(1.0)
    assert FAST.e2el == pytest.approx(1.4)
    assert FAST.tpot == pytest.approx(0.4 / 2)
    assert FAST.itls == pytest.approx([0.1, 0.3])
    assert SINGLE.tpot is None
    assert SINGLE.itls == []


def test_request_metrics() -> None:
    metrics = request_metrics([FAST, SINGLE, FAILED], duration=5.0, slos={"ttft": 1000.0})
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 40,
        "total_output_tokens": 4,
        "request_throughput": 0.4,
        "output_throughput": 0.8,
        "total_token_throughput": 44 / 5,
        "request_goodput": 0.2,
        "mean_ttft_ms": 2500.0,
        "median_ttft_ms": 2500.0,
        "p99_ttft_ms": 1000 + 3000 * 0.99,
        "std_ttft_ms": 1500.0,
        "mean_e2el_ms": 2700.0,
        "mean_tpot_ms": 200.0,
        "p99_tpot_ms": 200.0,
        "mean_itl_ms": 200.0,
        "p99_itl_ms": 100 + 200 * 0.99,
        "mean_queue_ms": 250.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_percentiles_can_be_chosen() -> None:
    metrics = request_metrics([FAST, SINGLE], 5.0, percentiles=(25.0, 99.9))
    assert metrics["p25_ttft_ms"] == pytest.approx(1750)
    assert "p99.9_ttft_ms" in metrics
    assert "median_ttft_ms" not in metrics


def test_no_success_gives_counts_and_no_latency() -> None:
    metrics = request_metrics([FAILED], 1.0, {"ttft": 5000.0})
    assert (metrics["completed"], metrics["failed"], metrics["request_goodput"]) == (0, 1, 0)
    assert not any(key.endswith("_ms") for key in metrics)


@pytest.mark.parametrize(
    ("request_", "slos", "met"),
    [
        (FAST, {"ttft": 1000.0, "tpot": 201.0, "e2el": 1400.1}, True),
        (FAST, {"ttft": 999.0}, False),
        (FAST, {"tpot": 199.0}, False),
        (FAST, {"ttft": 2000.0, "e2el": 1399.0}, False),
        (SINGLE, {"tpot": 0.0}, True),
        (FAILED, {"ttft": 99999.0}, False),
    ],
)
def test_goodput_needs_every_objective(request_: RequestRecord, slos: dict[str, float], met: bool) -> None:
    assert meets(request_, slos) is met


def test_goodput_syntax() -> None:
    assert parse_goodput(["ttft:500 tpot:50", "e2el:2000"]) == {"ttft": 500, "tpot": 50, "e2el": 2000}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:5", "500"])
def test_goodput_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        parse_goodput([text])


def step(
    number: int, elapsed: float, rows: RowCounts, work: list[SequenceWork], reserved: int, used: int
) -> StepDetail:
    return StepDetail(StepRecord(number, float(number), elapsed, rows), work, [], [], reserved, used)


PREFILL = step(
    0,
    1.0,
    RowCounts(prefill=6, padding=2),
    [SequenceWork("a", 4, 0, True, False), SequenceWork("b", 4, 2, True, False)],
    reserved=32,
    used=6,
)
DECODE = step(
    1,
    0.5,
    RowCounts(decode=1, ended=1),
    [SequenceWork("a", 1, 0, True, False), SequenceWork("b", 1, 0, True, True)],
    reserved=32,
    used=5,
)
NEXT = step(2, 0.5, RowCounts(prefill=2, recomputed=3), [SequenceWork("c", 5, 0, False, False)], reserved=16, used=5)


def test_step_metrics() -> None:
    metrics = step_metrics([PREFILL, DECODE, NEXT], duration=4.0, work=UsefulWork(100.0, 50.0, 1000.0))
    expected = {
        "steps": 3,
        "device_busy": 0.5,
        "useful_share": 9 / 15,
        "effective_utilisation": 0.3,
        "rows_total": 15,
        "rows_prefill": 8,
        "rows_decode": 1,
        "rows_padding": 2,
        "rows_ended": 1,
        "rows_recomputed": 3,
        "rows_wasted": 6,
        "max_running": 2,
        "kv_reserved_tokens": (32 * 1.5 + 16 * 0.5) / 2,
        "kv_used_tokens": (6 * 1.0 + 5 * 0.5 + 5 * 0.5) / 2,
        "kv_used_share": 11 / 56,
        # Nine useful rows, and three tokens sampled for somebody, in 4 s of 1,000 FLOP/s.
        "mfu": (9 * 100 + 3 * 50) / 4000,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_batches_are_cut_where_no_sequence_goes_on() -> None:
    first, second = find_batches([PREFILL, DECODE, NEXT])
    assert (first.requests, first.steps, first.generating_steps) == (("a", "b"), 2, 2)
    assert (first.row_steps, first.wasted_row_steps) == (4, 1)
    assert (second.requests, second.steps, second.generating_steps, second.row_steps) == (("c",), 1, 0, 0)
