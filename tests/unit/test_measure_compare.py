"""Both policies on one executor: the counts of the worked example, and what is reported of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from support.checking_executor import CheckingExecutor, continuation

from chairlift.config import EngineConfig
from chairlift.engine.clock import VirtualClock
from chairlift.measure.compare import Comparison, Policy, PolicyResult, compare, to_json
from chairlift.measure.drive import MeasurementError, run_workload
from chairlift.measure.metrics import find_batches, run_metrics
from chairlift.measure.records import Run
from chairlift.measure.scenarios import ScenarioOptions, build_scenario
from chairlift.measure.table import comparison_table
from chairlift.measure.timeline import find_spans
from chairlift.measure.workload import Workload, WorkloadRequest

STEP = 0.01  # seconds of each step of the executor
STATIC, CONTINUOUS = Policy("static", 4, 0.1), Policy("continuous", 4)


def executor(num_blocks: int = 400) -> CheckingExecutor:
    return CheckingExecutor(num_blocks, 16, max_model_len=4096)


def run(workload: Workload, policy: Policy, num_blocks: int = 400) -> Run:
    clock = VirtualClock(100.0)
    inner = executor(num_blocks)
    scheduler = policy.scheduler(EngineConfig(), inner.capacity())
    made = run_workload(workload, scheduler, inner, clock, sleep=clock.advance)
    scheduler.check_integrity()
    assert scheduler.kv.num_used_blocks == 0
    return made


@pytest.fixture
def worked_example() -> Workload:
    return build_scenario("worked-example", ScenarioOptions(max_length=4096, vocab_size=900))


def test_static_runs_a_to_d_through_200_steps_and_then_e_and_f(worked_example: Workload) -> None:
    made = run(worked_example, STATIC)
    first, second = find_batches(made.steps)
    assert first.requests == ("A", "B", "C", "D")
    assert (first.generating_steps, first.row_steps, first.wasted_row_steps) == (200, 800, 510)
    assert second.requests == ("E", "F")
    assert (second.generating_steps, second.row_steps, second.wasted_row_steps) == (40, 80, 0)
    # The whole batch is answered when its longest is, and a client has its first token then.
    ends = {r.name: r.finished for r in made.requests}
    assert {name: ends[name] for name in "ABCD"} == pytest.approx(dict.fromkeys("ABCD", 200 * STEP))
    assert {name: ends[name] for name in "EF"} == pytest.approx(dict.fromkeys("EF", 240 * STEP))
    assert all(r.ttft == r.e2el and r.itls == [0.0] * (r.output_tokens - 1) for r in made.requests)


def test_continuous_admits_e_in_the_step_after_d_ends(worked_example: Workload) -> None:
    made = run(worked_example, CONTINUOUS)
    (batch,) = find_batches(made.steps)
    assert (batch.generating_steps, batch.row_steps, batch.wasted_row_steps) == (200, 370, 0)
    names = [[item.name for item in step.work] for step in made.steps]
    assert [number for number, step in enumerate(names) if "D" in step] == list(range(10))
    assert made.steps[9].record.finished == 1
    assert list(made.steps[10].admitted) == ["E"]
    assert [number for number, step in enumerate(names) if "E" in step] == list(range(10, 50))
    assert {r.name: round(r.finished / STEP) for r in made.requests} == {
        "D": 10, "C": 30, "B": 50, "E": 50, "F": 70, "A": 200,
    }  # fmt: skip
    assert sum(step.record.rows.wasted for step in made.steps) == 0


def test_both_give_every_request_just_what_it_asked_for(worked_example: Workload) -> None:
    for policy in (STATIC, CONTINUOUS):
        made = run(worked_example, policy)
        assert {r.name: r.output_tokens for r in made.requests} == {
            r.name: r.output_tokens for r in worked_example.requests
        }
        assert all(len(r.token_times) == r.output_tokens for r in made.requests)


def test_kv_in_use_is_what_is_computed_and_still_needed() -> None:
    requests = (WorkloadRequest("long", (1,) * 20, 5), WorkloadRequest("short", (2,) * 3, 2))
    workload = Workload("w", "", requests)
    static = run(workload, Policy("static", 2, 0.0))
    # Each row can hold 20 + 4 tokens: two blocks. "short" needs its 3, then 4, and then nothing more.
    assert [step.kv_reserved for step in static.steps] == [64] * 5
    assert [step.kv_used for step in static.steps] == [20 + 3, 21 + 4, 22, 23, 24]
    assert [step.record.rows.padding for step in static.steps] == [17, 0, 0, 0, 0]
    continuous = run(workload, Policy("continuous", 2))
    assert [step.kv_used for step in continuous.steps] == [20 + 3, 21 + 4, 22, 23, 24]
    assert [step.kv_reserved for step in continuous.steps] == [48, 48, 32, 32, 32]


def test_a_closed_loop_never_has_more_open_than_clients_and_sends_at_once() -> None:
    requests = tuple(WorkloadRequest(str(n), (n + 1,) * 8, 3 + n % 5) for n in range(30))
    made = run(Workload("w", "", requests, clients=4), Policy("continuous", 8))
    assert len(made.requests) == 30
    assert max(len(step.work) for step in made.steps) == 4
    sends = sorted(r.sent for r in made.requests)
    ends = sorted(r.finished for r in made.requests)
    assert sends[:4] == [0.0] * 4
    assert sends[4:] == ends[: len(sends) - 4]


def test_an_open_loop_sends_at_its_times_and_waiting_counts() -> None:
    requests = tuple(WorkloadRequest(str(n), (n + 1,) * 8, 10, arrival=t) for n, t in enumerate((0.0, 0.035, 5.0)))
    made = run(Workload("w", "", requests), Policy("continuous", 1))
    by_name = {r.name: r for r in made.requests}
    assert [by_name[n].sent for n in "012"] == pytest.approx([0, 0.035, 5.0])
    # The second comes while the first runs, in the middle of a step, and waits until it ends.
    assert by_name["1"].started == pytest.approx(10 * STEP)
    assert by_name["1"].e2el == pytest.approx(20 * STEP - 0.035)
    assert by_name["2"].e2el == pytest.approx(10 * STEP)
    assert run_metrics(made)["device_busy"] == pytest.approx(0.3 / 5.1)


def test_a_static_batch_that_does_not_fill_waits_for_its_time() -> None:
    made = run(Workload("w", "", (WorkloadRequest("a", (1,) * 8, 4),)), Policy("static", 4, 0.25))
    assert made.requests[0].started == pytest.approx(0.25)
    assert made.duration == pytest.approx(0.25 + 4 * STEP)


def test_a_refused_request_is_an_error_and_not_a_number() -> None:
    workload = Workload("w", "", (WorkloadRequest("a", (1,) * 200, 4),))
    with pytest.raises(MeasurementError, match=r"request a was refused: .*KV blocks"):
        run(workload, CONTINUOUS, num_blocks=4)


def test_preemption_is_counted_and_every_answer_comes() -> None:
    requests = tuple(WorkloadRequest(str(n), (n + 1,) * 30, 40) for n in range(6))
    made = run(Workload("w", "", requests), Policy("continuous", 6), num_blocks=16)
    metrics = run_metrics(made)
    assert metrics["preemptions"] > 0
    assert metrics["rows_recomputed"] > 0
    assert metrics["useful_share"] < 1
    assert all(r.output_tokens == 40 for r in made.requests)
    assert all(step.kv_used <= step.kv_reserved for step in made.steps)
    spans = find_spans(made, 6)
    assert {s.kind for s in spans} >= {"waiting", "recomputed"}


@pytest.fixture
def comparison(worked_example: Workload) -> Comparison:
    return compare(worked_example, executor(), EngineConfig(), [STATIC, CONTINUOUS], repeats=2, slos={"e2el": 1e6})


def test_the_json_document(comparison: Comparison) -> None:
    document = json.loads(json.dumps(to_json(comparison, detailed=True)))
    assert document["schema"] == "chairlift.compare/1"
    static, continuous = document["policies"]
    assert (static["name"], continuous["name"]) == ("static-4", "continuous-4")
    assert len(static["repeats"]) == 2
    for repeat in static["repeats"]:
        assert [(b["row_steps"], b["wasted_row_steps"]) for b in repeat["batches"]] == [(800, 510), (80, 0)]
        assert {r["name"] for r in repeat["requests"]} == set("ABCDEF")
        assert repeat["steps"][0]["rows"]["prefill"] == 64
        assert repeat["steps"][0]["work"][0] == {
            "name": "A", "rows": 16, "padding": 0, "sampled": True, "ended": False,
        }  # fmt: skip
    assert [(b["row_steps"], b["wasted_row_steps"]) for b in continuous["repeats"][0]["batches"]] == [(370, 0)]
    assert static["metrics"]["rows_ended"] == {"median": 510, "min": 510, "max": 510}
    (change,) = document["changes"]
    assert change["percent"]["rows_ended"] == -100
    assert change["percent"]["useful_share"] == pytest.approx((1 / (460 / 970) - 1) * 100)
    assert "requests" not in to_json(comparison)["policies"][0]["repeats"][0]


def result(policy: Policy, output: list[float], p99: list[float], like: PolicyResult) -> PolicyResult:
    metrics = [{"output_throughput": o, "p99_e2el_ms": p} for o, p in zip(output, p99, strict=True)]
    return replace(like, policy=policy, metrics=metrics)


def test_static_is_named_where_it_wins(comparison: Comparison) -> None:
    like = comparison.continuous
    static = result(STATIC, [100.0, 110.0], [50.0, 52.0], like)
    worse = replace(comparison, results=[static, result(CONTINUOUS, [80.0, 85.0], [70.0, 71.0], like)])
    assert worse.verdicts()[0].count("WORSE") == 2
    level = replace(comparison, results=[static, result(CONTINUOUS, [104.0, 111.0], [40.0, 41.0], like)])
    assert "better output tokens/s (× 1.02, within the spread of the repeats)" in level.verdicts()[0]
    assert "better P99 latency (× 0.79)" in level.verdicts()[0]


def test_the_table_names_every_number_and_policy(comparison: Comparison) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(comparison_table(comparison))
    text = console.export_text()
    for words in ("static-4", "continuous-4", "Effective utilisation", "KV reserved", "wasted: ended", "-100 %", "510"):
        assert words in text


def test_timeline_of_the_worked_example(worked_example: Workload) -> None:
    static = find_spans(run(worked_example, STATIC), 4)
    lanes = {s.name: s.lane for s in static if s.lane >= 0}
    assert lanes == {"A": 0, "B": 1, "C": 2, "D": 3, "E": 0, "F": 1}
    ended = {s.name: (s.first_step, s.last_step) for s in static if s.kind == "ended"}
    assert ended == {"B": (50, 199), "C": (30, 199), "D": (10, 199)}
    waits = {s.name: s.end for s in static if s.kind == "waiting" and s.end > s.start}
    assert waits == pytest.approx({"E": 2.0, "F": 2.0})
    continuous = find_spans(run(worked_example, CONTINUOUS), 4)
    assert {s.name: s.lane for s in continuous if s.lane >= 0} == {"A": 0, "B": 1, "C": 2, "D": 3, "E": 3, "F": 2}
    assert "ended" not in {s.kind for s in continuous}
    with pytest.raises(ValueError, match="more than 3"):
        find_spans(run(worked_example, CONTINUOUS), 3)


def test_the_executor_of_these_tests_is_honest(worked_example: Workload) -> None:
    """Its tokens depend on every slot that a step reads, so a wrong plan could not have gone unseen above."""
    first = worked_example.requests[0]
    assert continuation(first.prompt_token_ids, 0, 2, ()) != continuation(first.prompt_token_ids[1:], 0, 2, ())
