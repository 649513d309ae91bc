"""Who is admitted, in which order and with how much of a step: priority, fairness, the reserve for those that run."""

from __future__ import annotations

from support.driving import Driver, memory_driver, request

from chairlift.scheduling.preemption import OutputLengths


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
