"""When memory runs out: swap, victims, and steps that fail in between."""

from __future__ import annotations

import logging

import pytest
from support.checking_executor import CheckingExecutor
from support.driving import assert_right_tokens, memory_driver, request

from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AddRequest, EngineCore
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.block_pool import BlockPool
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import Preemption
from chairlift.scheduling.sampling_params import SamplingParams


def test_memory_already_touched_is_used_before_fresh_memory():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(reversed(blocks))
    assert pool.allocate(3) == blocks


class TestSwap:
    def test_blocks_go_to_the_host_and_come_back(self):
        driver = memory_driver(num_blocks=6, host=6, caching=False, preemption_mode="swap")
        early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
        driver.add(early, late)
        while not any(plan.preempted for plan in driver.plans):
            driver.step()
        [event] = driver.plans[-1].preempted
        assert event == Preemption("late", wanted_by="early", swapped=True, num_tokens=12, num_blocks=3)
        assert len(driver.plans[-1].swap_out) == 3
        assert (driver.scheduler.num_swapped, driver.scheduler.num_waiting) == (1, 0)
        driver.run()
        assert sum(len(plan.swap_in) for plan in driver.plans) == 3
        assert sum(plan.rows.recomputed for plan in driver.plans) == 0
        assert driver.kv.num_used_host_blocks == 0
        assert_right_tokens(driver, early, late)

    def test_a_full_host_falls_back_to_recomputation(self):
        """The engine died (vllm#787)."""
        driver = memory_driver(num_blocks=6, host=2, caching=False, preemption_mode="swap")
        early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
        driver.add(early, late)
        driver.run()
        events = [event for plan in driver.plans for event in plan.preempted]
        assert [(event.swapped, event.host_full) for event in events] == [(False, True)]
        assert_right_tokens(driver, early, late)

    def test_the_swapped_resume_before_new_ones_are_admitted(self):
        driver = memory_driver(num_blocks=6, host=6, preemption_mode="swap")
        driver.add(request("early", 8, 12), request("late", 8, 8))
        while not any(plan.preempted for plan in driver.plans):
            driver.step()
        driver.add(request("new", 2, 2))
        driver.run()
        admitted = [name for plan in driver.plans for name in plan.admitted]
        assert admitted == ["early", "late", "late", "new"]

    @pytest.mark.parametrize(("swap_seconds", "swapped"), [(0.001, True), (10.0, False)])
    def test_auto_takes_what_costs_less(self, swap_seconds: float, swapped: bool):
        driver = memory_driver(
            num_blocks=6,
            host=6,
            caching=False,
            preemption_mode="auto",
            recompute_seconds_per_token=1.0,
            swap_seconds_per_block=swap_seconds,
        )
        driver.add(request("early", 8, 12), request("late", 8, 8))
        driver.run()
        assert [event.swapped for plan in driver.plans for event in plan.preempted] == [swapped]

    def test_abort_while_swapped_frees_the_host(self):
        driver = memory_driver(num_blocks=6, host=6, preemption_mode="swap")
        driver.add(request("early", 8, 12), request("late", 8, 8))
        while not driver.scheduler.num_swapped:
            driver.step()
        driver.scheduler.abort("late")
        driver.scheduler.check_integrity()
        assert driver.kv.num_used_host_blocks == driver.scheduler.num_swapped == 0
        driver.run()
        assert set(driver.finished_in) == {"early"}

    def test_coming_back_leaves_what_is_reserved_for_others(self):
        kv = KVManager(8, 4, num_host_blocks=4)
        r = request("a", 12, 8)
        assert kv.admit(r) == 0
        r.num_computed_tokens = 12
        assert kv.swap_out(r) == [(0, 0), (1, 1), (2, 2)]
        assert kv.swap_in(r, spare=6) is None
        assert (kv.num_used_blocks, kv.num_used_host_blocks) == (0, 3)
        assert kv.swap_in(r, spare=5) is not None
        assert (kv.num_used_blocks, kv.num_used_host_blocks) == (3, 0)
        kv.check_integrity()

    def test_the_beginning_of_one_that_is_swapped_out_is_forgotten_last(self):
        kv = KVManager(4, 4, num_host_blocks=4, prefix_cache=PrefixCache(4, 4, salt=b""))
        r = request("a", 16, 8)
        kv.admit(r)
        r.num_computed_tokens = 16
        kv.register(r, 0)
        table = list(kv.table("a"))
        kv.swap_out(r)
        assert kv.pool.free_blocks() == table[::-1]


class TestVictims:
    def test_a_prompt_half_way_gives_way_and_gets_no_rows_in_that_step(self):
        driver = memory_driver(num_blocks=11, budget=8, max_num_seqs=4, caching=False)
        early, prompt = request("early", 4, 20), request("prompt", 36, 2)
        driver.add(early)
        driver.step()
        driver.add(prompt)
        while not any(plan.preempted for plan in driver.plans):
            driver.step()
        assert driver.plans[-1].preempted[0].request_id == "prompt"
        assert prompt.num_computed_tokens == 0
        assert driver.planned(driver.plans[-1]) == {"early": 1}
        driver.run()
        assert_right_tokens(driver, early, prompt)

    def test_nobody_comes_back_in_a_step_in_which_another_gave_way(self):
        """Though what the other leaves would be enough: the first in the queue has least computed."""
        driver = memory_driver(num_blocks=9, caching=False, victim_rule="least-work", max_num_seqs=4)
        driver.add(request("first", 4, 29), request("little", 1, 12), request("much", 16, 12))
        driver.run()
        steps = [plan for plan in driver.plans if plan.preempted]
        assert {event.request_id for plan in steps for event in plan.preempted} >= {"little", "much"}
        assert not any(plan.admitted for plan in steps)

    def drive_to_preemption(self, **config) -> str:
        """Three requests on a pool too small: the second has most computed, the third came last."""
        driver = memory_driver(num_blocks=11, caching=False, **config)
        requests = [
            request("first", 4, 30, priority=1),
            request("second", 20, 8, priority=1),
            request("third", 8, 8, priority=1),
        ]
        if config.get("policy") == "priority":
            requests[2].priority = 0
        driver.add(*requests)
        driver.run()
        assert_right_tokens(driver, *requests)
        return next(plan.preempted[0].request_id for plan in driver.plans if plan.preempted)

    def test_the_latest_gives_way(self):
        assert self.drive_to_preemption() == "third"

    def test_under_priority_the_lowest_gives_way_though_it_came_earlier(self):
        assert self.drive_to_preemption(policy="priority") == "second"

    def test_least_work_spares_the_one_with_most_computed(self):
        driver = memory_driver(num_blocks=8, caching=False, victim_rule="least-work")
        requests = [request("first", 4, 20), request("short", 4, 14), request("long", 12, 14)]
        driver.add(*requests)
        driver.run()
        assert next(plan.preempted[0].request_id for plan in driver.plans if plan.preempted) == "short"
        assert_right_tokens(driver, *requests)

    def test_least_work_takes_from_the_lowest_class_alone(self):
        driver = memory_driver(num_blocks=8, caching=False, victim_rule="least-work", policy="priority")
        driver.add(request("first", 4, 20), request("little", 4, 14), request("lowest", 12, 14, priority=1))
        driver.run()
        assert next(plan.preempted[0].request_id for plan in driver.plans if plan.preempted) == "lowest"

    def test_being_admitted_again_is_not_being_admitted(self):
        driver = memory_driver(num_blocks=6, caching=False)
        late = request("late", 8, 8)
        driver.add(request("early", 8, 12), late)
        driver.run()
        assert late.timing.preemptions == 1
        assert late.timing.admitted == 0.0
        with_timing = [delta for delta in driver.deltas if delta.request_id == "late" and delta.timing is not None]
        assert [len(with_timing), with_timing[0] is driver.deltas[1]] == [2, True], "the first and the last"

    def test_each_preemption_is_logged_once_with_its_reason(self, caplog: pytest.LogCaptureFixture):
        params = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)
        commands = [AddRequest(name, list(range(8)), params, 0.0) for name in ("early", "late")]
        scheduler = ContinuousScheduler(SchedulerConfig(max_num_seqs=4), KVManager(6, 4), 4096)
        core = EngineCore(
            scheduler, CheckingExecutor(6, 4), VirtualClock(), lambda: [commands.pop(0) for _ in [*commands]]
        )
        records = []
        with caplog.at_level(logging.INFO, "chairlift"):
            while commands or core.has_work:
                records.append(core.step().record)
        assert sum(record.preempted for record in records) == len(caplog.messages) == 1
        assert "12 tokens lost" in caplog.messages[0]
        assert "needed a KV block" in caplog.messages[0]


def test_a_failed_step_that_swapped_loses_nothing():
    """What it should have moved may be nowhere: it is computed again."""
    driver = memory_driver(num_blocks=6, host=6, caching=False, preemption_mode="swap")
    early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
    driver.add(early, late)
    while not any(plan.preempted for plan in driver.plans):
        driver.step()
        if driver.scheduler.num_swapped == 0 and driver.kv.pool.num_free == 0:
            plan = driver.scheduler.plan(driver.now)  # swaps out, and is never executed
            if plan.swap_out:
                break
    driver.scheduler.check_integrity()
    driver.run()
    assert driver.kv.num_used_host_blocks == 0
    assert_right_tokens(driver, early, late)


def test_a_failed_step_that_swapped_in_loses_nothing():
    """The blocks on the device may hold anything, and those on the host are free for others."""
    driver = memory_driver(num_blocks=6, host=6, caching=False, preemption_mode="swap")
    early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
    driver.add(early, late)
    while not driver.scheduler.num_swapped:
        driver.step()
    plan = driver.scheduler.plan(driver.now)
    while not plan.swap_in:
        for delta in driver.scheduler.commit(plan, driver.executor.execute(plan), driver.now):
            driver.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        plan = driver.scheduler.plan(driver.now)
    driver.scheduler.check_integrity()
    # It is never executed.
    assert driver.planned(driver.step())["late"] == late.num_prompt_tokens + len(driver.tokens["late"]) - 1
    driver.run()
    assert_right_tokens(driver, early, late)


def test_of_two_that_a_failed_step_swapped_in_the_first_may_take_the_whole_next_step():
    """They decoded when it was planned, and are prompts to be computed when it has failed: decode's right is gone."""
    driver = memory_driver(
        num_blocks=9, host=9, budget=8, max_num_seqs=4, caching=False, preemption_mode="swap",
        long_prefill_token_threshold=8,
    )  # fmt: skip
    early, a, b = request("early", 8, 28, seed=1), request("a", 8, 20, seed=2), request("b", 8, 20, seed=3)
    driver.add(early, a, b)
    while "early" not in driver.finished_in:
        driver.step()
    assert driver.scheduler.num_swapped == 2
    failed = driver.scheduler.plan(driver.now)
    assert driver.planned(failed) == {"a": 1, "b": 1}
    assert failed.swap_in
    assert driver.planned(driver.step()) == {"a": 8}
    driver.run()
    assert_right_tokens(driver, early, a, b)


def test_one_with_nothing_to_move_is_not_kept_from_the_host_by_want_of_room():
    """What a failed step admitted has nothing computed when another needs its blocks."""
    driver = memory_driver(num_blocks=3, host=9, caching=False, preemption_mode="swap")
    early, late = request("early", 8, 4), request("late", 4, 4)
    driver.add(early, late)
    driver.step()
    late.num_computed_tokens = 0  # as a failed step leaves one that it swapped in
    plan = driver.scheduler.plan(driver.now)
    assert plan.preempted == [Preemption("late", wanted_by="early", swapped=False, num_tokens=0)]


def test_a_prompt_of_one_token_is_not_yet_decoding():
    r = request("a", 1, 5)
    assert (r.num_missing_tokens, r.decoding) == (1, False)
    r.mark_computed(1)
    r.append(7)
    assert r.decoding


def test_rows_computed_again_in_slices_all_count_as_recomputed():
    driver = memory_driver(num_blocks=6, budget=4, max_num_seqs=4, caching=False, preemption_mode="recompute")
    early, late = request("early", 8, 12, seed=1), request("late", 8, 8, seed=2)
    driver.add(early, late)
    driver.run()
    [event] = [event for plan in driver.plans for event in plan.preempted]
    assert event.num_tokens > 4
    assert sum(plan.rows.recomputed for plan in driver.plans) == event.num_tokens
    assert sum(plan.rows.total for plan in driver.plans) == 8 + 11 + 8 + 7 + event.num_tokens
