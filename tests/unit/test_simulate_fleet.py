"""The simulation runs the engine's own loop: one replica is the same to the last token time."""

from __future__ import annotations

import itertools

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import VirtualClock
from chairlift.engine.executor import Capacity
from chairlift.measure.drive import run_workload
from chairlift.measure.metrics import request_metrics, step_metrics
from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest
from chairlift.scheduling.work import StepWork
from chairlift.simulate.executor import SimulatedExecutor
from chairlift.simulate.fleet import Fleet, Outcome, step_totals, with_rate
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.workloads import shares_prefixes, synthetic_workload, trace_workload

BLOCK = 16


class LinearCost:
    """Ten milliseconds a step and a tenth for each row."""

    def seconds(self, work: StepWork) -> float:
        return 0.010 + 0.0001 * work.rows + 1e-6 * work.context


def fleet(num_blocks: int = 400, **changes) -> Fleet:
    names = ("replicas", "routing", "detail", "give_up")
    capacity, config = setting(num_blocks, **{k: v for k, v in changes.items() if k not in names})
    return Fleet(config, capacity, LinearCost(), **{k: v for k, v in changes.items() if k in names})


def setting(num_blocks: int, **changes) -> tuple[Capacity, EngineConfig]:
    capacity = Capacity(
        num_blocks=num_blocks, block_size=BLOCK, max_model_len=2000, vocab_size=1000, max_num_batched_tokens=256
    )
    return capacity, EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False, **changes)


def workload(count: int = 60, **how) -> Workload:
    return synthetic_workload(draw_lengths("lognormal:60:1:400", "exponential:40:200", count, seed=3), **how)


def times(requests) -> dict:
    return {r.name: (r.sent, r.started, tuple(r.token_times), r.finished) for r in requests}


@pytest.mark.parametrize(
    "how",
    [{"rate": 8.0}, {"rate": 2.0, "burstiness": 0.1}, {"clients": 12}, {}],
    ids=["poisson", "bursty", "closed", "once"],
)
@pytest.mark.parametrize("changes", [{}, {"batching": "static", "static_batch_size": 4}], ids=["continuous", "static"])
@pytest.mark.parametrize("num_blocks", [400, 38], ids=["roomy", "tight"])
def test_one_replica_is_the_engine_under_a_virtual_clock(how: dict, changes: dict, num_blocks: int):
    work = workload(**how)
    capacity, config = setting(num_blocks, **changes)
    clock = VirtualClock()
    expected = run_workload(
        work,
        build_scheduler(config, capacity),
        SimulatedExecutor(capacity, LinearCost()),
        clock,
        sleep=clock.advance,
    )
    outcome = fleet(num_blocks, detail=True, **changes).run(work)
    found = times(outcome.requests)
    for name, (sent, started, tokens, finished) in times(expected.requests).items():
        assert found[name] == (
            pytest.approx(sent),
            pytest.approx(started),
            pytest.approx(tokens),
            pytest.approx(finished),
        )
    assert [step.work for step in outcome.details[0]] == [step.work for step in expected.steps]
    totals, full = step_totals(outcome), step_metrics(expected.steps, expected.duration)
    assert {key: full[key] for key in totals} == pytest.approx(totals)
    if num_blocks == 38 and not changes and "clients" in how:
        assert totals["preemptions"] > 0


@pytest.mark.parametrize("routing", ["round-robin", "least-load", "prefix-aware"])
@pytest.mark.parametrize("how", [{"rate": 20.0}, {"clients": 30}])
def test_every_request_is_answered_whole_by_one_of_the_replicas(routing: str, how: dict):
    work = workload(90, **how)
    outcome = fleet(replicas=3, routing=routing, detail=True).run(work)
    wanted = {request.name: request.output_tokens for request in work.requests}
    assert {record.name: record.output_tokens for record in outcome.requests} == wanted
    for record in outcome.requests:
        assert record.sent <= record.started < record.token_times[0]
        assert list(record.token_times) == sorted(record.token_times)
        assert record.token_times[-1] == record.finished <= outcome.duration
    where = [{item.name for step in steps for item in step.work} for steps in outcome.details]
    assert sorted(itertools.chain(*where)) == sorted(wanted)
    assert all(len(names) > 10 for names in where)
    assert step_totals(outcome)["rows_wasted"] == 0


def test_more_replicas_are_faster_and_busy_is_their_mean():
    work = workload(90, rate=40.0)
    one, three = fleet().run(work), fleet(replicas=3).run(work)
    latency = [request_metrics(o.requests, o.duration)["mean_e2el_ms"] for o in (one, three)]
    assert latency[1] < latency[0] / 2
    assert 0 < step_totals(three)["device_busy"] < step_totals(one)["device_busy"] <= 1


def test_replicas_see_each_other_at_the_time_of_an_arrival():
    """A long request goes to the first; those that arrive while it runs go to the second, until it has more."""
    requests = [WorkloadRequest("long", (1,) * 200, 400, 0.0)]
    requests += [WorkloadRequest(str(i), (2,) * 10, 5, 1.0 + i) for i in range(3)]
    outcome = fleet(replicas=2, detail=True).run(Workload("x", "", tuple(requests)))
    where = [{item.name for step in steps for item in step.work} for steps in outcome.details]
    assert where == [{"long"}, {"0", "1", "2"}]
    by_name = {record.name: record for record in outcome.requests}
    for i in range(3):  # an idle replica wakes up at the arrival, not earlier and not later
        assert by_name[str(i)].started == pytest.approx(1.0 + i)


def test_round_robin_takes_turns():
    work = workload(9, rate=1.0)
    outcome = fleet(replicas=3, routing="round-robin", detail=True).run(work)
    where = [sorted({int(item.name) for step in steps for item in step.work}) for steps in outcome.details]
    assert where == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]


def conversations(count: int, turns: int) -> Workload:
    requests = [
        WorkloadRequest(f"{c}.{t}", (c,) * 320 + (t,) * 16, 8, t * 4.0 + c * 0.1)
        for t in range(turns)
        for c in range(count)
    ]
    return Workload("conversations", "", tuple(sorted(requests, key=lambda r: r.arrival)))


def test_prefix_aware_routing_keeps_equal_prompts_together_and_computes_less():
    work = conversations(10, 4)
    assert shares_prefixes(work)
    rows = {}
    for routing in ("round-robin", "prefix-aware"):
        capacity, config = setting(2000)
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=True)
        outcome = Fleet(config, capacity, LinearCost(), replicas=3, routing=routing).run(work)
        rows[routing] = step_totals(outcome)["rows_prefill"]
    whole = 10 * 4 * 336
    assert rows["prefix-aware"] == whole - 10 * 3 * 320
    assert rows["prefix-aware"] < rows["round-robin"] < whole


def test_a_prefix_that_everybody_shares_does_not_overload_one_replica():
    requests = tuple(WorkloadRequest(str(i), (7,) * 100, 50, i * 0.001) for i in range(40))
    outcome = fleet(replicas=4, routing="prefix-aware", detail=True).run(Workload("same", "", requests))
    shares = [len({item.name for step in steps for item in step.work}) for steps in outcome.details]
    assert sum(shares) == 40
    assert max(shares) <= 1.3 * 40 / 4


def test_a_simulation_can_be_given_up():
    seen = []

    def give_up(record) -> bool:
        seen.append(record.name)
        return len(seen) == 5

    outcome = fleet(give_up=give_up).run(workload(60, rate=8.0))
    assert outcome.aborted
    assert 5 <= len(outcome.requests) < 10


def test_what_cannot_be_is_refused():
    with pytest.raises(WorkloadError, match="--replicas must be at least 1"):
        fleet(replicas=0)
    with pytest.raises(WorkloadError, match="--routing must be one of round-robin, least-load, prefix-aware"):
        fleet(routing="random").run(workload())
    with pytest.raises(WorkloadError, match=r"cannot be served: .* need 125 KV blocks"):
        fleet(40).run(synthetic_workload(draw_lengths("1000", "1000", 2)))
    with pytest.raises(WorkloadError, match="no rate to change"):
        with_rate(workload(), 3.0)
    with pytest.raises(WorkloadError, match="time scale"):
        trace_workload("x", max_length=100, time_scale=0)


def test_a_rate_is_changed_and_nothing_else():
    work = workload(50, rate=2.0)
    faster = with_rate(work, 8.0)
    assert faster.requests[-1].arrival == pytest.approx(50 / 8)
    assert [r.arrival * 4 for r in faster.requests] == pytest.approx([r.arrival for r in work.requests])
    assert [r.num_tokens for r in faster.requests] == [r.num_tokens for r in work.requests]


def test_the_cost_of_simulating_grows_with_the_tokens_and_not_with_the_queue():
    """Steps and rows are what is paid for: twice the requests are twice the rows, and no step is looked at twice."""

    def rows(count: int) -> tuple[int, float]:
        outcome: Outcome = fleet().run(synthetic_workload(draw_lengths("64", "32", count)))
        return len(outcome.records[0]), step_totals(outcome)["rows_total"]

    (steps, total), (more_steps, more_total) = rows(64), rows(128)
    assert more_total == 2 * total == 128 * (64 + 31)
    assert more_steps == pytest.approx(2 * steps, rel=0.1)


def test_blocks_of_equal_id_in_a_trace_are_equal_tokens(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 9]}\n'
        '{"timestamp": 900, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}\n'
    )
    first, second, third = (r.prompt_token_ids for r in trace_workload(path, max_length=4096).requests)
    assert (len(first), len(second), len(third)) == (1030, 1100, 700)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1030]
    assert third[0] != first[0]
    halved = trace_workload(path, max_length=552, time_scale=2.0)
    assert [len(r.prompt_token_ids) for r in halved.requests] == [515, 550, 350]
    assert [r.arrival for r in halved.requests] == [0.0, 1.0, 1.8]
    assert "prompts × 0.5" in halved.description


def test_prompts_of_a_trace_without_ids_are_all_different(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,374,44\n" * 3)
    work = trace_workload(path, max_length=4096)
    assert not shares_prefixes(work)
    assert len({r.prompt_token_ids for r in work.requests}) == 3


def test_a_static_batch_that_does_not_fill_starts_at_its_timeout():
    requests = tuple(WorkloadRequest(str(i), (i,) * 10, 5, i * 0.05) for i in range(3))
    config = {"batching": "static", "static_batch_size": 8, "static_batch_timeout": 0.5}
    outcome = fleet(**config).run(Workload("few", "", requests))
    assert [record.started for record in outcome.requests] == pytest.approx([0.5] * 3)
