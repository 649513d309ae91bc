"""Iteration-level scheduling: what a step holds, and who gives way."""

from __future__ import annotations

import pytest
from support.checking_executor import EOS, continuation, next_token
from support.driving import Driver, request

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.plan import Preemption, StepResult
from chairlift.scheduling.scheduler import RequestRefusedError


def continuous(max_num_seqs: int = 4, budget: int = 16, max_model_len: int = 4096, **driver) -> Driver:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Driver(lambda kv: ContinuousScheduler(config, kv, max_model_len), **driver)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decoding_of_others():
    driver = continuous(budget=16)
    driver.add(request("a", 4, 20), request("b", 4, 20))
    driver.step()
    driver.add(request("long", 40, 2))
    chunks = [driver.planned(driver.step()) for _ in range(4)]
    assert chunks == [
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 12},
        {"a": 1, "b": 1, "long": 1},
    ]
    assert driver.finished_in["long"] == 4


def test_a_new_request_delays_nobody_by_more_than_one_chunk():
    driver = continuous(max_num_seqs=8, budget=16)
    driver.add(*(request(f"d{i}", 2, 50) for i in range(6)))
    driver.step()
    driver.add(request("huge", 400, 1))
    while driver.scheduler.has_work:
        open_before = [f"d{i}" for i in range(6) if f"d{i}" not in driver.finished_in]
        plan = driver.step()
        assert plan.num_tokens <= 16
        assert all(driver.planned(plan).get(name) == 1 for name in open_before)


def test_two_partial_prefills_are_served_in_order_of_arrival():
    driver = continuous(budget=10)
    driver.add(request("first", 15, 1), request("second", 15, 1))
    assert [driver.planned(driver.step()) for _ in range(3)] == [
        {"first": 10},
        {"first": 5, "second": 5},
        {"second": 10},
    ]


def test_admission_is_first_come_first_served_and_nobody_is_overtaken():
    driver = continuous(num_blocks=10, block_size=4)
    driver.add(request("a", 20, 10), request("big", 24, 2), request("small", 4, 2))
    driver.step()
    plan = driver.step()
    assert driver.planned(plan) == {"a": 4}, "small fits, but big is before it"
    driver.run()
    admitted = [name for plan in driver.plans for name in plan.admitted]
    assert admitted == ["a", "big", "small"]


def test_when_blocks_run_out_the_latest_gives_way_and_its_answer_does_not_change():
    driver = continuous(num_blocks=6, block_size=4)
    early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
    driver.add(early, late)
    driver.run()
    preempted = [event for plan in driver.plans for event in plan.preempted]
    assert preempted == [Preemption("late", wanted_by="early", swapped=False, num_tokens=12)]
    assert late.timing.preemptions == 1
    assert sum(plan.rows.recomputed for plan in driver.plans) == 12  # three full blocks when the fourth was refused
    assert driver.tokens["early"] == continuation(early.token_ids[:8], 1, 12, ())
    assert driver.tokens["late"] == continuation(late.token_ids[:8], 2, 8, ())


def test_nobody_is_admitted_in_a_step_in_which_memory_ran_out():
    driver = continuous(num_blocks=6, block_size=4)
    driver.add(request("early", 8, 12), request("late", 8, 8))
    driver.run()
    assert all(not (plan.preempted and plan.admitted) for plan in driver.plans)


def test_readmission_waits_until_the_whole_sequence_fits():
    """Readmitted as soon as one chunk fitted, it would be put aside at once, again and again (vllm#21809)."""
    driver = continuous(num_blocks=6, block_size=4, budget=4)
    driver.add(request("early", 4, 20), request("late", 4, 16))
    driver.run()
    assert sum(len(plan.preempted) for plan in driver.plans) == 1


def test_a_request_that_outgrows_the_pool_is_refused_at_the_door_with_the_sum():
    driver = continuous(num_blocks=10, block_size=4)
    driver.add(request("fits", 10, 31))  # 40 computed tokens: the last one is never computed
    with pytest.raises(RequestRefusedError, match=r"10 prompt tokens and up to 32 new ones need 11 KV blocks of 4"):
        driver.add(request("too long", 10, 32))
    driver.run()
    assert set(driver.finished_in) == {"fits"}


def test_a_prompt_as_long_as_the_model_is_refused():
    driver = continuous(max_model_len=32)
    with pytest.raises(RequestRefusedError, match="leaves no room to generate"):
        driver.add(request("a", 32, 1))


def test_the_models_length_ends_a_request_that_asks_for_more():
    driver = continuous(max_model_len=32)
    driver.add(request("a", 30, 100))
    driver.run()
    assert len(driver.tokens["a"]) == 2
    assert driver.deltas[-1].finish_reason == "length"


def test_an_id_in_use_is_refused_and_its_owner_goes_on():
    driver = continuous()
    driver.add(request("a", 4, 3))
    with pytest.raises(RequestRefusedError, match="already in use"):
        driver.add(request("a", 5, 3))
    driver.run()
    assert len(driver.tokens["a"]) == 3


def test_end_of_sequence_stops_unless_it_is_ignored():
    prompt = next(p for p in ([i] for i in range(1000)) if next_token(p, 0) == EOS)
    driver = continuous()
    driver.add(request("stops", prompt, 5, ignore_eos=False), request("goes on", prompt, 5))
    driver.run()
    ends = {delta.request_id: delta for delta in driver.deltas if delta.finish_reason}
    assert driver.tokens["stops"] == [EOS]
    assert (ends["stops"].finish_reason, ends["stops"].stop_reason) == ("stop", None)
    assert len(driver.tokens["goes on"]) == 5
    assert ends["goes on"].finish_reason == "length"


def test_a_requests_own_stop_token_is_named_as_the_reason():
    token = next_token([7, 8], 0)
    driver = continuous()
    driver.add(request("a", [7, 8], 5, stop_token_ids=(token,)))
    driver.run()
    assert driver.tokens["a"] == [token]
    assert (driver.deltas[-1].finish_reason, driver.deltas[-1].stop_reason) == ("stop", token)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_abort_is_legal_in_every_state_and_frees_at_once(when: str):
    driver = continuous(num_blocks=6, block_size=4)
    driver.add(request("other", 8, 12), request("victim", 8, 8))
    if when == "running":
        driver.step()
    while when == "preempted" and not any(plan.preempted for plan in driver.plans):
        driver.step()
    delta = driver.scheduler.abort("victim")
    assert delta is not None
    assert delta.finish_reason == "abort"
    driver.scheduler.check_integrity()
    assert driver.scheduler.abort("victim") is None
    driver.run()
    assert set(driver.finished_in) == {"other"}
    assert driver.kv.num_used_blocks == 0


def test_abort_of_a_request_that_ends_in_the_same_step_frees_once():
    """A double free (mini-sglang#111)."""
    driver = continuous()
    driver.add(request("a", 4, 1), request("b", 4, 5))
    plan = driver.scheduler.plan(0.0)
    result = driver.executor.execute(plan)
    driver.scheduler.abort("a")
    assert [delta.request_id for delta in driver.scheduler.commit(plan, result, 0.1)] == ["b"]
    driver.scheduler.check_integrity()


def test_an_executor_that_returns_too_few_tokens_is_found_out():
    driver = continuous()
    driver.add(request("a", 4, 5), request("b", 4, 5))
    plan = driver.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="should have sampled 2 tokens, not 1"):
        driver.scheduler.commit(plan, StepResult([1], 0.0), 0.0)


def test_timing_tells_when_each_stage_began():
    driver = continuous(max_num_seqs=1)
    driver.add(request("a", 4, 3), request("b", 4, 2))
    driver.run()
    timing = {d.request_id: d.timing for d in driver.deltas if d.timing}
    assert timing["a"].admitted == 0.0
    assert timing["b"].admitted == pytest.approx(0.03)
    assert timing["b"].first_token == pytest.approx(0.04)
    assert timing["b"].finished == pytest.approx(0.05)


def test_a_budget_below_the_number_of_sequences_is_refused():
    with pytest.raises(ValueError, match="must be at least max_num_seqs"):
        SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=16)
