"""When memory runs out: prefix cache, swap, victims, reserve, and the pitfalls that others paid for."""

from __future__ import annotations

import logging

import pytest
from support.checking_executor import CheckingExecutor, continuation
from support.driving import Driver, request

from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AddRequest, EngineCore
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.block_pool import BlockPool
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import Preemption
from chairlift.scheduling.preemption import OutputLengths
from chairlift.scheduling.sampling_params import SamplingParams


def memory_driver(
    num_blocks: int = 1000, *, budget: int = 64, max_num_seqs: int = 8, host: int = 0, caching: bool = True, **config
) -> Driver:
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config)
    driver = Driver(
        lambda kv: ContinuousScheduler(limits, kv, 4096), num_blocks=num_blocks, block_size=4, num_host_blocks=host
    )
    cache = PrefixCache(num_blocks, 4, salt=b"test") if caching else None
    driver.kv = KVManager(num_blocks, 4, num_host_blocks=host, prefix_cache=cache)
    driver.scheduler = ContinuousScheduler(limits, driver.kv, 4096)
    return driver


def assert_right_tokens(driver: Driver, *requests) -> None:
    for r in requests:
        prompt = r.token_ids[: r.num_prompt_tokens]
        assert driver.tokens[r.request_id] == continuation(prompt, r.params.seed, r.params.max_tokens, ())


class TestPrefixCache:
    def test_an_equal_beginning_is_computed_once(self):
        driver = memory_driver()
        stem = list(range(20))
        first, second = request("first", [*stem, 50], 3), request("second", [*stem, 60, 61], 3)
        driver.add(first)
        driver.run()
        driver.add(second)
        plan = driver.step()
        assert driver.planned(plan) == {"second": 2}
        assert (plan.num_cached_tokens, plan.num_looked_up_tokens) == (20, 22)
        assert second.timing.cached_tokens == 20
        driver.run()
        assert_right_tokens(driver, first, second)

    def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation(self):
        driver = memory_driver()
        first = request("first", list(range(8)), 9)
        driver.add(first)
        driver.run()
        second = request("second", [*first.token_ids, 70], 2)
        driver.add(second)
        assert driver.step().num_cached_tokens == 16  # the seventeenth token was generated, but never computed
        driver.run()
        assert_right_tokens(driver, second)

    def test_a_prompt_that_is_found_whole_still_computes_its_last_token(self):
        """No token left to compute (nano-vllm#114)."""
        driver = memory_driver()
        first, again = request("first", list(range(16)), 2), request("again", list(range(16)), 2)
        driver.add(first)
        driver.run()
        driver.add(again)
        assert driver.planned(driver.step()) == {"again": 4}
        driver.run()
        assert_right_tokens(driver, first, again)

    def test_a_block_is_not_found_before_it_is_computed(self):
        """vllm#7822."""
        driver = memory_driver(budget=8)
        first, second = request("first", list(range(20)), 2), request("second", list(range(20)), 2)
        driver.add(first, second)
        driver.run()
        assert_right_tokens(driver, first, second)
        driver = memory_driver(budget=64)
        driver.add(first := request("a", list(range(20)), 2), second := request("b", list(range(20)), 2))
        assert driver.step().num_cached_tokens == 0
        driver.run()
        assert_right_tokens(driver, first, second)

    def test_found_blocks_in_the_free_list_are_not_free_for_others(self):
        """vllm#11565; and counting and taking them is one act (nano-vllm#211)."""
        driver = memory_driver(num_blocks=10)
        driver.add(request("first", list(range(24)), 1))
        driver.run()
        assert driver.kv.pool.num_free == 10
        # Six blocks are found, all of them free: eleven are needed in all, and there are ten.
        table = driver.kv.pool.free_blocks()
        assert driver.kv.admit(request("too long", list(range(41)), 1)) is None
        assert driver.kv.pool.free_blocks() == table
        assert driver.kv.admit(request("fits", list(range(40)), 1)) == 24
        assert driver.kv.pool.num_free == 0
        driver.kv.check_integrity()

    def test_a_shared_block_is_freed_once_by_each_holder(self):
        """Double free (vllm#3347)."""
        driver = memory_driver()
        stem = list(range(16))
        driver.add(request("first", [*stem, 40], 20))
        driver.step()
        driver.add(request("second", [*stem, 50], 20), request("third", [*stem, 60], 20))
        driver.step()
        assert driver.kv.table("first")[:4] == driver.kv.table("second")[:4] == driver.kv.table("third")[:4]
        assert [driver.kv.pool.ref_counts[block] for block in driver.kv.table("first")[:4]] == [3] * 4
        for name in ("second", "first", "third"):
            driver.scheduler.abort(name)
            driver.scheduler.check_integrity()
        assert driver.kv.num_used_blocks == 0

    def test_the_tail_of_the_least_recently_used_is_forgotten_first(self):
        driver = memory_driver(num_blocks=8, max_num_seqs=1)
        driver.add(request("old", list(range(100, 116)), 1), request("new", list(range(200, 216)), 1))
        driver.run()
        driver.add(request("other", list(range(300, 308)), 1))  # two blocks
        driver.run()
        cache = driver.kv.prefix_cache
        found = {}
        for name, first in (("old", 100), ("new", 200)):
            hashes: list[bytes] = []
            cache.extend_hashes(hashes, list(range(first, first + 16)), None)
            found[name] = len(cache.find(hashes))
        assert found == {"old": 2, "new": 4}

    def test_a_salt_keeps_a_prompt_to_those_who_know_it(self):
        driver = memory_driver()
        stem = list(range(16))
        for name, salt, found in (
            ("a", None, 0),
            ("b", "s", 0),
            ("c", "t", 0),
            ("d", "s", 16),
            ("e", None, 16),
            ("f", "", 0),
        ):
            r = request(name, [*stem, 40], 1)
            r.cache_salt = salt
            driver.add(r)
            assert driver.step().num_cached_tokens == found, name

    def test_hashes_cannot_be_predicted(self):
        """Two processes give the same prompt different hashes (vllm#12621)."""
        chains = []
        for _ in range(2):
            hashes: list[bytes] = []
            PrefixCache(4, 4).extend_hashes(hashes, list(range(8)), None)
            chains.append(hashes)
        assert len(chains[0]) == len(chains[1]) == 2
        assert not set(chains[0]) & set(chains[1])

    def test_a_hash_covers_all_that_comes_before(self):
        cache = PrefixCache(4, 2, salt=b"")
        one, other = [], []
        cache.extend_hashes(one, [1, 2, 3, 4], None)
        cache.extend_hashes(other, [9, 2, 3, 4], None)
        assert one[1] != other[1]

    def test_a_preempted_request_finds_its_own_blocks_again(self):
        driver = memory_driver(num_blocks=12, preemption_mode="recompute")
        early, late = request("early", 8, 25, seed=1), request("late", 8, 25, seed=2)
        driver.add(early, late)
        driver.run()
        assert late.timing.preemptions
        assert sum(plan.num_cached_tokens for plan in driver.plans) > 0
        assert_right_tokens(driver, early, late)


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


class TestPriority:
    def test_lower_values_are_admitted_first_and_equals_in_order(self):
        driver = memory_driver(policy="priority", max_num_seqs=1)
        for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 1), ("e", -3)):
            driver.add(request(name, 4, 1, priority=priority))
        driver.run()
        assert sorted(driver.finished_in, key=driver.finished_in.__getitem__) == ["e", "b", "d", "a", "c"]

    def test_fcfs_does_not_look_at_priority(self):
        driver = memory_driver(max_num_seqs=1)
        driver.add(request("a", 4, 1, priority=5), request("b", 4, 1, priority=0))
        driver.run()
        assert driver.finished_in["a"] < driver.finished_in["b"]


class TestFairness:
    def test_a_huge_prompt_leaves_half_a_step_to_the_short_ones_behind_it(self):
        driver = memory_driver(budget=64, max_num_seqs=16)
        driver.add(request("huge", 1000, 1))
        driver.step()
        driver.add(*(request(f"s{i}", 20, 1) for i in range(4)))
        for _ in range(4):
            assert driver.planned(driver.step())["huge"] >= 32
        assert all(f"s{i}" in driver.finished_in for i in range(4))
        assert "huge" not in driver.finished_in

    def test_short_ones_do_not_starve_the_huge_one(self):
        driver = memory_driver(budget=64, max_num_seqs=16)
        driver.add(request("huge", 1000, 1))
        count = 0
        while "huge" not in driver.finished_in:
            driver.add(request(f"s{count}", 30, 1))
            plan = driver.step()
            assert driver.planned(plan)["huge"] >= min(32, 1000 - 32 * count)
            count += 1
        assert count <= 32

    def test_what_the_others_leave_goes_to_the_huge_one(self):
        driver = memory_driver(budget=64)
        driver.add(request("huge", 1000, 1), request("small", 4, 10))
        assert driver.planned(driver.step()) == {"huge": 60, "small": 4}

    def test_no_more_prompts_than_allowed_are_left_half_way(self):
        driver = memory_driver(budget=32, max_num_partial_prefills=1)
        driver.add(request("a", 100, 1), request("b", 100, 1))
        while driver.scheduler.has_work:
            plan = driver.step()
            partial = sum(chunk.sampling is None for chunk in plan.chunks)
            assert partial <= 1

    def test_a_prompt_that_the_step_just_completes_may_begin_beside_one_left_half_way(self):
        driver = memory_driver(budget=32, max_num_partial_prefills=1)
        driver.add(request("a", 100, 1), request("b", 16, 1))
        assert driver.planned(driver.step()) == {"a": 16, "b": 16}

    def test_nor_with_a_threshold_that_cuts_those_that_would_fit_a_step(self):
        driver = memory_driver(budget=64, long_prefill_token_threshold=8, max_num_partial_prefills=1)
        driver.add(request("a", 100, 1), request("b", 50, 1), request("c", 5, 1))
        while driver.scheduler.has_work:
            plan = driver.step()
            assert sum(chunk.sampling is None for chunk in plan.chunks) <= 1
            assert plan.num_tokens == 64 or driver.scheduler.num_waiting == 0

    def test_the_threshold_caps_a_long_prompt(self):
        driver = memory_driver(budget=64, long_prefill_token_threshold=8, max_num_partial_prefills=4)
        driver.add(request("a", 30, 1), request("b", 50, 1), request("c", 48, 1))
        assert driver.planned(driver.step()) == {"a": 30, "b": 26, "c": 8}


class TestAdmissionReserve:
    def run_with(self, reserve: bool) -> tuple[int, Driver]:
        driver = memory_driver(num_blocks=40, caching=False, max_num_seqs=16, admission_reserve=reserve)
        for wave in range(4):
            driver.add(*(request(f"r{wave}.{i}", 8, 24) for i in range(10)))
        driver.run()
        return sum(len(plan.preempted) for plan in driver.plans), driver

    def test_it_avoids_most_preemptions_once_it_has_seen_how_long_answers_are(self):
        without, _ = self.run_with(reserve=False)
        with_reserve, driver = self.run_with(reserve=True)
        assert without > 10
        assert with_reserve < without / 3
        assert len(driver.finished_in) == 40

    def test_the_first_to_be_admitted_has_its_growth_reserved_too(self):
        driver = memory_driver(num_blocks=11, caching=False, admission_reserve=True)
        driver.scheduler._output_lengths.add(20)
        driver.add(request("a", 4, 20), request("b", 4, 20))
        driver.step()
        assert driver.scheduler.num_running == 1, "two prompts of a block, and two answers of five, are twelve blocks"
        driver.run()
        assert sum(len(plan.preempted) for plan in driver.plans) == 0

    def test_somebody_always_runs(self):
        """Even if nobody could run were the last token's place reserved, which is never computed."""
        driver = memory_driver(num_blocks=8, caching=False, admission_reserve=True)
        driver.scheduler._output_lengths.add(1000)
        driver.add(*(request(f"r{i}", 4, 29) for i in range(5)))
        driver.run()
        assert len(driver.finished_in) == 5

    def test_the_expected_rest_is_the_mean_rest_of_those_that_got_further(self):
        lengths = OutputLengths()
        for length in (10, 20, 30, 40):
            lengths.add(length)
        r = request("a", 4, 100)
        r.max_tokens = 104
        r.token_ids += [0] * 20
        assert lengths.expected_rest(r) == (30 + 40) // 2 - 20
        r.token_ids += [0] * 30
        assert lengths.expected_rest(r) == 50  # nobody got this far: as much again, which is all it may
        r.token_ids += [0] * 45
        assert lengths.expected_rest(r) == 5

    def test_lengths_are_those_of_the_answers_alone(self):
        driver = memory_driver(admission_reserve=True)
        driver.add(request("a", 50, 7))
        driver.run()
        r = request("b", 4, 100)
        r.max_tokens = 104
        assert driver.scheduler._output_lengths.expected_rest(r) == 7

    def test_only_the_newest_lengths_count(self):
        lengths = OutputLengths(sample_size=2)
        for length in (1000, 10, 12):
            lengths.add(length)
        r = request("a", 4, 100)
        r.max_tokens = 104
        assert lengths.expected_rest(r) == 11
        lengths.add(20)
        assert lengths.expected_rest(r) == 16


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
