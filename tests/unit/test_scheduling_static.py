"""The static baseline computes what a static server computes: no less, and no more."""

from __future__ import annotations

import pytest
from support.checking_executor import continuation
from support.driving import Driver, request

from chairlift.scheduling.continuous import ContinuousScheduler, SchedulerConfig
from chairlift.scheduling.scheduler import RequestRefusedError
from chairlift.scheduling.static import StaticConfig, StaticScheduler

OUTPUTS = {"A": 200, "B": 50, "C": 30, "D": 10, "E": 40, "F": 40}


def static(batch_size: int = 4, timeout: float = 1.0, budget: int = 512, max_model_len: int = 4096, **driver) -> Driver:
    config = StaticConfig(batch_size=batch_size, timeout=timeout, max_num_batched_tokens=budget)
    return Driver(lambda kv: StaticScheduler(config, kv, max_model_len), **driver)


def continuous(max_num_seqs: int = 4, budget: int = 512) -> Driver:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Driver(lambda kv: ContinuousScheduler(config, kv, 4096))


def test_worked_example_static_steps_every_row_until_the_longest_ends():
    driver = static(timeout=0)
    driver.add(*(request(name, 12, count) for name, count in OUTPUTS.items()))
    driver.run()
    first = driver.plans[:200]
    assert all({c.request_id for c in plan.chunks} == set("ABCD") for plan in first)
    assert sum(len(plan.chunks) for plan in first) == 800
    assert sum(plan.rows.ended for plan in first) == 800 - (200 + 50 + 30 + 10)
    second = driver.plans[200:]
    assert all({c.request_id for c in plan.chunks} == set("EF") for plan in second)
    assert len(second) == 40
    assert sum(plan.rows.ended for plan in second) == 0
    assert driver.finished_in == {"A": 199, "B": 199, "C": 199, "D": 199, "E": 239, "F": 239}


def test_worked_example_continuous_hands_each_place_on_in_the_next_step():
    driver = continuous()
    driver.add(*(request(name, 12, count) for name, count in OUTPUTS.items()))
    driver.run()
    assert driver.finished_in == {"D": 9, "C": 29, "B": 49, "A": 199, "E": 49, "F": 69}
    assert driver.plans[10].admitted == ["E"]
    assert driver.plans[30].admitted == ["F"]
    assert sum(plan.rows.wasted for plan in driver.plans) == 0
    assert sum(plan.rows.decode for plan in driver.plans) == sum(OUTPUTS.values()) - len(OUTPUTS)


def test_both_policies_give_the_same_tokens():
    answers = []
    for driver in (static(timeout=0), continuous()):
        driver.add(*(request(name, 5 + 7 * i, count, seed=i) for i, (name, count) in enumerate(OUTPUTS.items())))
        driver.run()
        answers.append(driver.tokens)
    assert answers[0] == answers[1]


def test_prompts_are_padded_to_the_longest_and_the_padding_is_computed():
    driver = static(timeout=0)
    requests = [request("a", 10, 3), request("b", 3, 3), request("c", 7, 3)]
    driver.add(*requests)
    plan = driver.step()
    assert driver.planned(plan) == {"a": 10, "b": 10, "c": 10}
    assert [chunk.num_padding for chunk in plan.chunks] == [0, 7, 3]
    assert (plan.rows.prefill, plan.rows.padding) == (20, 10)
    driver.run()
    for r in requests:
        assert driver.tokens[r.request_id] == continuation(r.token_ids[: r.num_prompt_tokens], 0, 3, ())


def test_long_prompts_are_computed_in_slices_within_the_budget():
    driver = static(timeout=0, budget=16)
    requests = [request("a", 20, 4), request("b", 3, 4)]
    driver.add(*requests)
    driver.run()
    assert [plan.num_tokens for plan in driver.plans] == [16, 16, 8, 2, 2, 2]
    for r in requests:
        assert driver.tokens[r.request_id] == continuation(r.token_ids[: r.num_prompt_tokens], 0, 4, ())


def test_a_batch_waits_to_be_full_or_for_its_timeout():
    driver = static(batch_size=3, timeout=1.0)
    driver.add(request("a", 4, 2, arrival=0.0), request("b", 4, 2, arrival=0.5))
    driver.now = 0.6
    assert driver.step().wait_until == 1.0
    driver.add(request("c", 4, 2, arrival=0.6))
    assert driver.step().admitted == ["a", "b", "c"]
    driver.run()
    driver.add(request("d", 4, 2, arrival=10.0))
    driver.now = 11.0
    assert driver.step().admitted == ["d"]


def test_memory_is_reserved_for_the_longest_possible_sequence_and_given_back_together():
    driver = static(timeout=0, block_size=4)
    driver.add(request("a", 8, 33), request("b", 4, 1))
    driver.step()
    assert driver.kv.num_used_blocks == 10 + 9  # 8 + 33 − 1 tokens, and 4 + 33 − 1
    driver.step()
    assert driver.kv.num_used_blocks == 19
    driver.run()
    assert driver.kv.num_used_blocks == 0


def test_a_batch_is_cut_to_what_the_pool_can_reserve():
    driver = static(timeout=0, num_blocks=20, block_size=4)
    driver.add(request("a", 8, 33), request("b", 4, 5), request("c", 4, 5))
    assert driver.step().admitted == ["a", "b"]
    driver.run()
    assert set(driver.finished_in) == {"a", "b", "c"}


def test_an_ended_row_never_leaves_its_reservation_or_the_models_length():
    driver = static(timeout=0, max_model_len=32)
    driver.add(request("short", 2, 30), request("long", 30, 2))
    driver.run()
    assert all(c.start + len(c.token_ids) <= 32 for plan in driver.plans for c in plan.chunks)
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"short": 30, "long": 2}


def test_an_aborted_row_is_computed_on_and_counts_as_waste():
    driver = static(timeout=0)
    driver.add(request("a", 4, 10), request("b", 4, 10))
    driver.step()
    driver.scheduler.abort("a")
    plan = driver.step()
    assert driver.planned(plan) == {"a": 1, "b": 1}
    assert (plan.rows.decode, plan.rows.ended) == (1, 1)
    driver.run()
    assert set(driver.finished_in) == {"b"}


def test_the_last_abort_ends_the_batch_and_frees_it():
    driver = static(timeout=0)
    driver.add(request("a", 4, 10), request("b", 4, 10), request("c", 4, 10), request("d", 4, 10), request("e", 4, 10))
    driver.step()
    for name in "abcd":
        driver.scheduler.abort(name)
    assert driver.kv.num_used_blocks == 0
    assert driver.step().admitted == ["e"]


def test_a_released_batch_goes_out_though_the_last_open_row_is_aborted():
    """The ended rows' answers wait for the batch; an abort of the only row still open must not strand them."""
    driver = static(timeout=0)
    driver.add(request("a", 4, 2), request("b", 4, 10))
    driver.step()
    driver.step()
    assert not driver.deltas
    driver.scheduler.abort("b")
    driver.run()
    assert driver.finished_in == {"a": 2}
    assert len(driver.tokens["a"]) == 2


@pytest.mark.parametrize(("prompt", "max_tokens"), [(4096, 1), (4100, 5)])
def test_a_prompt_without_room_to_generate_is_refused(prompt: int, max_tokens: int):
    with pytest.raises(RequestRefusedError, match="leaves no room"):
        static().add(request("a", prompt, max_tokens))


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"timeout": -1.0}, {"batch_size": 64, "max_num_batched_tokens": 32}]
)
def test_impossible_settings_are_refused(options: dict[str, float]):
    with pytest.raises(ValueError, match="must be at least"):
        StaticConfig(**options)
