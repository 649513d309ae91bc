"""Rules of routing, alone and before replicas of the real scheduler."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.executor import Capacity
from chairlift.measure.workload import Workload, WorkloadRequest
from chairlift.scheduling.routing import ROUTES, make_router
from chairlift.scheduling.work import StepWork
from chairlift.simulate.fleet import Fleet

IDLE = {0: 0.0, 1: 0.0, 2: 0.0}
BLOCK = 16


def router(name: str, num_blocks: int = 1000):
    return make_router(name, block_size=4, num_blocks=num_blocks)


def test_round_robin_takes_turns_whoever_comes_and_goes():
    rule = router("round-robin")
    assert [rule.choose((), 1, IDLE) for _ in range(4)] == [0, 1, 2, 0]
    assert [rule.choose((), 1, {1: 0.0, 2: 9.0}) for _ in range(3)] == [1, 2, 1]
    assert rule.choose((), 1, IDLE | {3: 0.0}) == 3


def test_least_load_breaks_ties_in_turn():
    rule = router("least-load")
    assert rule.choose((), 1, {0: 5.0, 1: 3.0, 2: 4.0}) == 1
    assert [rule.choose((), 1, IDLE) for _ in range(4)] == [0, 2, 1, 0]


def test_prefix_aware_follows_the_longest_beginning():
    rule = router("prefix-aware")
    first, second = tuple(range(12)), tuple(range(100, 112))
    assert [rule.choose(first, 10, IDLE), rule.choose(second, 10, IDLE)] == [0, 1]
    assert rule.choose((*first, 1, 2, 3), 10, IDLE) == 0
    assert rule.choose((*second[:8], 1, 2, 3, 4), 10, IDLE) == 1
    assert rule.choose((*first[:3], 50, 51), 10, IDLE) == 2, "no whole block is equal"
    assert rule.choose(first, 10, IDLE, "salt") != 0, "another salt shares nothing"
    assert rule.choose(first, 10, {0: 1000.0, 1: 0.0, 2: 0.0}) != 0, "it is too busy"
    assert rule.choose(first, 10, {1: 0.0, 2: 0.0}) in (1, 2), "it is gone"


def test_prefix_aware_forgets_what_the_cache_cannot_hold_and_who_begins_anew():
    rule = router("prefix-aware", num_blocks=3)
    first = tuple(range(12))
    assert rule.choose(first, 10, IDLE) == 0
    assert rule.choose(tuple(range(100, 108)), 10, {0: 0.0}) == 0
    assert rule._blocks[0].keys() & set(rule._hashes(first, None)) == {next(rule._hashes(first, None))}
    rule.forget(0)
    assert rule.choose(first, 10, {0: 1.0, 1: 0.0}) == 1


@pytest.mark.parametrize("load_known", [True, False])
def test_no_replica_gets_much_more_than_its_share_of_one_popular_prompt(load_known: bool):
    """Whether requests pile up, or each has ended before the next comes."""
    rule = router("prefix-aware")
    loads = dict.fromkeys(range(4), 0.0)
    counts: Counter[int] = Counter()
    for _ in range(400):
        chosen = rule.choose((1,) * 40, 50, loads)
        counts[chosen] += 1
        loads[chosen] += 50.0 * load_known
    assert max(counts.values()) <= 1.3 * 100
    assert sum(counts.values()) == 400


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=f"--routing must be one of {', '.join(ROUTES)}"):
        router("random")


# ---- before the real scheduler, with its real prefix cache, under a virtual clock ----


class LinearCost:
    """Ten milliseconds a step and a tenth for each row."""

    def seconds(self, work: StepWork) -> float:
        return 0.010 + 0.0001 * work.rows


def shared_prefixes(count: int = 1000, prefixes: int = 64, rate: float = 12.0) -> Workload:
    """Prompts of 32 to 64 tokens behind one of many system prompts of 512, the popular ones far more often (Zipf)."""
    rng = random.Random(5)
    heads = [tuple(rng.randrange(1000) for _ in range(512)) for _ in range(prefixes)]
    weights = [1 / (rank + 1) ** 0.6 for rank in range(prefixes)]
    now = 0.0
    requests = []
    for index in range(count):
        now += rng.expovariate(rate)
        tail = tuple(rng.randrange(1000) for _ in range(rng.randint(32, 64)))
        (head,) = rng.choices(heads, weights)
        requests.append(WorkloadRequest(str(index), head + tail, rng.randint(16, 48), now))
    return Workload("shared prefixes", "", tuple(requests))


@dataclass(frozen=True)
class Routed:
    """What a rule came to.

    Attributes:
        hit_rate: of the tokens looked up in the prefix caches, the share that they had.
        loads: the work of the busiest replica over the mean, by requests, by tokens, and by rows computed.
    """

    hit_rate: float
    loads: tuple[float, float, float]


def routed(rule: str, work: Workload, replicas: int = 4) -> Routed:
    capacity = Capacity(
        num_blocks=700, block_size=BLOCK, max_model_len=2000, vocab_size=1000, max_num_batched_tokens=512
    )
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512)
    outcome = Fleet(config, capacity, LinearCost(), replicas=replicas, routing=rule, detail=True).run(work)
    requests = {request.name: request for request in work.requests}
    seen = [{item.name for step in steps for item in step.work} for steps in outcome.details]
    records = [record for steps in outcome.records for record in steps]
    hit_rate = sum(record.cached_tokens for record in records) / sum(record.looked_up_tokens for record in records)
    return Routed(
        hit_rate,
        (
            _over_mean([len(names) for names in seen]),
            _over_mean([sum(requests[name].num_tokens for name in names) for names in seen]),
            _over_mean([sum(record.rows.total for record in steps) for steps in outcome.records]),
        ),
    )


def _over_mean(values: list[int]) -> float:
    return max(values) * len(values) / sum(values)


def test_prefix_aware_hits_half_as_often_again_and_overloads_nobody():
    work = shared_prefixes()
    turns, aware = routed("round-robin", work), routed("prefix-aware", work)
    assert aware.hit_rate >= 1.5 * turns.hit_rate
    assert max(aware.loads) <= 1.3
