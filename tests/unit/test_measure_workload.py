"""Scenarios, arrivals and traces: what is sent, and when."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from chairlift.measure.arrivals import gamma_arrivals, ramp_arrivals
from chairlift.measure.scenarios import SCENARIOS, LengthShape, ScenarioOptions, build_scenario
from chairlift.measure.traces import fit_lengths, read_trace, trace_workload
from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest

OPTIONS = ScenarioOptions(max_length=1024, vocab_size=500, seed=3)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.5000000,100,0
2023-11-16 18:15:52.1805900,30,5
"""


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_same_seed_makes_the_same_workload_and_another_seed_another(name: str) -> None:
    workload = build_scenario(name, OPTIONS)
    assert workload == build_scenario(name, OPTIONS)
    other = build_scenario(name, ScenarioOptions(max_length=1024, vocab_size=500, seed=4))
    assert [r.prompt_token_ids for r in workload.requests] != [r.prompt_token_ids for r in other.requests]
    for request in workload.requests:
        assert request.num_tokens <= 1024
        assert all(0 <= token < 500 for token in request.prompt_token_ids)


def test_worked_example() -> None:
    workload = build_scenario("worked-example", OPTIONS)
    assert {r.name: r.output_tokens for r in workload.requests} == {
        "A": 200,
        "B": 50,
        "C": 30,
        "D": 10,
        "E": 40,
        "F": 40,
    }
    assert workload.clients is None
    assert {r.arrival for r in workload.requests} == {0.0}


def test_peaks_are_closed_loops_with_the_lengths_of_the_code_trace() -> None:
    options = ScenarioOptions(max_length=8192, vocab_size=10)
    for name, clients in (("peak-50", 50), ("peak-80", 80)):
        workload = build_scenario(name, options)
        assert workload.clients == clients
        count = len(workload.requests)
        assert count >= 2 * clients
        # The trace's own means, as its authors' file has them, within the little that so few draws allow.
        assert workload.prompt_tokens / count == pytest.approx(2048, rel=0.02)
        assert workload.output_tokens / count == pytest.approx(28, rel=0.1)
        outputs = [request.output_tokens for request in workload.requests]
        assert np.median(outputs) == pytest.approx(13, abs=1)


def test_prompts_shrink_with_the_model_and_outputs_do_not() -> None:
    full, quarter = (LengthShape("code_completion.json").draw(np.random.default_rng(0), 400, n) for n in (8192, 2048))
    shorter = np.mean([p for p, _ in quarter]) / np.mean([p for p, _ in full])
    assert shorter == pytest.approx(2048 / 7841, rel=0.01)
    kept = [small == large for (_, small), (_, large) in zip(quarter, full, strict=True)]
    assert np.mean(kept) > 0.98
    assert max(p + o for p, o in quarter) <= 2048


def test_uniform_has_one_length_and_bursty_comes_in_bursts() -> None:
    uniform = build_scenario("uniform", OPTIONS)
    assert len({(len(r.prompt_token_ids), r.output_tokens) for r in uniform.requests}) == 1
    bursty = build_scenario("bursty", ScenarioOptions(max_length=512, vocab_size=9, num_requests=2000))
    gaps = np.diff([r.arrival for r in bursty.requests])
    assert gaps.std() / gaps.mean() == pytest.approx(4, rel=0.2)
    assert 2000 / bursty.requests[-1].arrival == pytest.approx(4)


def test_a_scenario_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"sequences of 216 tokens.*length is 100"):
        build_scenario("worked-example", ScenarioOptions(max_length=100, vocab_size=10))
    with pytest.raises(WorkloadError, match="choose from worked-example"):
        build_scenario("nonsense", OPTIONS)


def test_arrivals() -> None:
    rng = np.random.default_rng(0)
    assert gamma_arrivals(rng, 3, math.inf) == [0, 0, 0]
    times = gamma_arrivals(rng, 5000, 10.0, 4.0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.05)
    linear = ramp_arrivals(rng, 4000, "linear", 1.0, 9.0)
    exponential = ramp_arrivals(rng, 4000, "exponential", 1.0, 9.0)
    for ramp in (linear, exponential):
        assert 200 / ramp[199] == pytest.approx(1, rel=0.35)
        assert 200 / (ramp[-1] - ramp[-201]) == pytest.approx(9, rel=0.2)
    # Half way the one is at the mean of the two rates, the other at their geometric mean.
    assert 400 / (linear[2200] - linear[1800]) == pytest.approx(5, rel=0.2)
    assert 400 / (exponential[2200] - exponential[1800]) == pytest.approx(3, rel=0.2)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf)])
def test_arrivals_refuse(rate: float, burstiness: float) -> None:
    with pytest.raises(WorkloadError):
        gamma_arrivals(np.random.default_rng(0), 5, rate, burstiness)


def test_a_workload_checks_itself() -> None:
    one = WorkloadRequest("1", (1,), 1)
    for requests, clients in (((), None), ((one, one), None), ((one,), 0)):
        with pytest.raises(WorkloadError):
            Workload("w", "", requests, clients)
    with pytest.raises(WorkloadError):
        WorkloadRequest("1", (), 1)
    with pytest.raises(WorkloadError):
        WorkloadRequest("1", (1,), 0)


def test_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    trace = read_trace(file)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace] == [(374, 44), (396, 109), (30, 5)]
    assert [r.time for r in trace] == pytest.approx([0, 4.314579, 5.5], abs=1e-6)
    workload = trace_workload(file, max_length=8192, vocab_size=50, seed=0, time_scale=2.0, limit=2)
    assert [r.arrival for r in workload.requests] == pytest.approx([0, 8.629158], abs=1e-5)
    assert workload.clients is None


def test_lengths_are_scaled_by_one_rule(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    lengths, factor = fit_lengths(read_trace(file), 101)
    assert factor == pytest.approx(101 / 505)
    # 374, 396 and 30 prompt tokens times a fifth; outputs are kept, and cut where no room is left.
    assert lengths == [(75, 26), (79, 22), (6, 5)]
    assert fit_lengths(read_trace(file), 10_000) == ([(374, 44), (396, 109), (30, 5)], 1.0)


def test_mooncake_trace_shares_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 4500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 3, 4]},
        {"timestamp": 2500, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 9]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    workload = trace_workload(file, max_length=4096, vocab_size=5000, seed=0, time_scale=1.0, limit=None)
    assert [r.arrival for r in workload.requests] == pytest.approx([0, 1.5, 3.5])
    first, second, third = (r.prompt_token_ids for r in workload.requests)
    assert [len(first), len(second), len(third)] == [1030, 1536, 1100]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1030]
    assert first[:512] == third[:512]
    assert first[512:1024] != third[512:1024]
    scaled = trace_workload(file, max_length=300, vocab_size=5000, seed=0, time_scale=1.0, limit=None)
    first, second, third = (r.prompt_token_ids for r in scaled.requests)
    assert first[:199] == second[:199]
    assert first[:99] == third[:99]
    assert first[101:150] != third[101:150]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "neither a JSON object"),
        ("a,b,c\n1,2,3\n", "neither a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE + "yesterday,1,1\n", "line 6"),
        (AZURE + "2023-11-16 18:15:53.0000000,1\n", "line 6"),
        (AZURE + "2023-11-16 18:15:53.0000000,0,1\n", "line 6: 0 tokens"),
        (AZURE + "2023-11-16 18:15:53.0000000,5,-1\n", "line 6: -1 tokens"),
        ('{"timestamp": 1, "input_length": 5}\n', "line 1: 'output_length' is missing"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}\n', "line 1: a timestamp of nan"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}\nnot json\n', "line 2"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}\n[1]\n', "line 2"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        read_trace(file)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="cannot read"):
        read_trace(tmp_path / "binary")
