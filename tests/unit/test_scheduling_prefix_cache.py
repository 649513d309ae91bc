"""Blocks that hold the same beginning already: found when they are computed, shared, forgotten in order."""

from __future__ import annotations

from support.driving import assert_right_tokens, memory_driver, request

from chairlift.scheduling.kv.prefix_cache import PrefixCache


def test_an_equal_beginning_is_computed_once():
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


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    driver = memory_driver()
    first = request("first", list(range(8)), 9)
    driver.add(first)
    driver.run()
    second = request("second", [*first.token_ids, 70], 2)
    driver.add(second)
    assert driver.step().num_cached_tokens == 16  # the seventeenth token was generated, but never computed
    driver.run()
    assert_right_tokens(driver, second)


def test_a_prompt_that_is_found_whole_still_computes_its_last_token():
    """No token left to compute (nano-vllm#114)."""
    driver = memory_driver()
    first, again = request("first", list(range(16)), 2), request("again", list(range(16)), 2)
    driver.add(first)
    driver.run()
    driver.add(again)
    assert driver.planned(driver.step()) == {"again": 4}
    driver.run()
    assert_right_tokens(driver, first, again)


def test_a_block_is_not_found_before_it_is_computed():
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


def test_found_blocks_in_the_free_list_are_not_free_for_others():
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


def test_a_shared_block_is_freed_once_by_each_holder():
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


def test_the_tail_of_the_least_recently_used_is_forgotten_first():
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


def test_a_salt_keeps_a_prompt_to_those_who_know_it():
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


def test_hashes_cannot_be_predicted():
    """Two processes give the same prompt different hashes (vllm#12621)."""
    chains = []
    for _ in range(2):
        hashes: list[bytes] = []
        PrefixCache(4, 4).extend_hashes(hashes, list(range(8)), None)
        chains.append(hashes)
    assert len(chains[0]) == len(chains[1]) == 2
    assert not set(chains[0]) & set(chains[1])


def test_a_hash_covers_all_that_comes_before():
    cache = PrefixCache(4, 2, salt=b"")
    one, other = [], []
    cache.extend_hashes(one, [1, 2, 3, 4], None)
    cache.extend_hashes(other, [9, 2, 3, 4], None)
    assert one[1] != other[1]


def test_a_preempted_request_finds_its_own_blocks_again():
    driver = memory_driver(num_blocks=12, preemption_mode="recompute")
    early, late = request("early", 8, 25, seed=1), request("late", 8, 25, seed=2)
    driver.add(early, late)
    driver.run()
    assert late.timing.preemptions
    assert sum(plan.num_cached_tokens for plan in driver.plans) > 0
    assert_right_tokens(driver, early, late)
