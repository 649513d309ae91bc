"""Random lives of a scheduler: arrivals, steps, aborts at every moment, executors that fail, pools far too small."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checking_executor import EOS, CheckingExecutor, ExecutorFailureError, continuation

from chairlift import SamplingParams
from chairlift.scheduling.config import POLICIES, PREEMPTION_MODES, VICTIM_RULES, SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import StepPlan
from chairlift.scheduling.request import Request, Status
from chairlift.scheduling.scheduler import RequestRefusedError, Scheduler
from chairlift.scheduling.static import StaticConfig, StaticScheduler

MAX_MODEL_LEN = 60


# Values that a life is made of, as tables: benchmarks/soak.py draws from the same ones.
POOLS: dict[str, Sequence[Any]] = {
    "num_blocks": range(1, 25),
    "block_size": (1, 2, 4),
    "max_num_seqs": range(1, 7),
    "extra_budget": range(13),
    "num_host_blocks": (0, 3, 40),
    "prefix_caching": (False, True),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "policy": POLICIES,
    "preemption_mode": PREEMPTION_MODES,
    "victim_rule": VICTIM_RULES,
    "admission_reserve": (False, True),
    "max_num_partial_prefills": (1, 2, 3),
    "long_prefill_token_threshold": (None, *range(1, 9)),
    "swap_seconds_per_block": (0.1, 1.0, 3.0),
}
REQUESTS: dict[str, Sequence[Any]] = {
    "stem": ([], [1, 1, 1, 1], [1] * 9, [2] * 20),
    "max_tokens": range(1, 21),
    "seed": range(10),
    "priority": range(3),
    "cache_salt": (None, None, "x"),
}
TAIL_TOKENS, LONGEST_TAIL = range(6), 20
NTH = range(100)  # which of the open requests, counted round


def choices(table: dict[str, Sequence[Any]]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(values) for name, values in table.items()}


class SchedulerMachine(RuleBasedStateMachine):
    """What holds for every policy. A subclass makes the scheduler and checks each plan."""

    scheduler: Scheduler

    def make_scheduler(self, max_num_seqs: int, budget: int, options: dict[str, Any]) -> Scheduler:
        raise NotImplementedError

    def check_plan(self, plan: StepPlan, decoding: set[str]) -> None:
        raise NotImplementedError

    @initialize(**choices(POOLS), options=st.fixed_dictionaries(choices(OPTIONS)))
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        num_host_blocks: int,
        prefix_caching: bool,
        options: dict[str, Any],
    ) -> None:
        self.max_num_seqs, self.budget = max_num_seqs, max_num_seqs + extra_budget
        cache = PrefixCache(num_blocks, block_size, salt=b"") if prefix_caching else None
        self.kv = KVManager(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=cache)
        self.scheduler = self.make_scheduler(max_num_seqs, self.budget, options)
        self.executor = CheckingExecutor(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.open: set[str] = set()
        self.moved_in_vain: set[str] = set()  # by a step that failed: they are computed anew
        self.num_failed_steps = 0
        self.now = 0.0

    @rule(**choices(REQUESTS), tail=st.lists(st.sampled_from(TAIL_TOKENS), min_size=1, max_size=LONGEST_TAIL))
    def add(
        self, stem: list[int], tail: list[int], max_tokens: int, seed: int, priority: int, cache_salt: str | None
    ) -> None:
        request_id = f"r{len(self.requests)}"
        prompt = stem + tail
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, seed=seed),
            eos_token_ids=(EOS,),
            arrival=self.now,
            priority=priority,
            cache_salt=cache_salt,
        )
        capacity = self.kv.num_blocks * self.kv.block_size
        longest = min(MAX_MODEL_LEN, len(prompt) + max_tokens)
        if longest - 1 > capacity:
            with pytest.raises(RequestRefusedError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.open.add(request_id)

    @precondition(lambda self: self.open)
    @rule(nth=st.sampled_from(NTH))
    def abort(self, nth: int) -> None:
        self._abort(self._nth_open(nth))

    @rule()
    def abort_unknown(self) -> None:
        assert self.scheduler.abort("nobody") is None

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work:
                self._step()

    @precondition(lambda self: self.open)
    @rule(nth=st.sampled_from(NTH))
    def step_with_abort_in_flight(self, nth: int) -> None:
        self._step(aborted_in_flight=self._nth_open(nth))

    @precondition(lambda self: self.open)
    @rule(nth=st.lists(st.sampled_from(NTH), min_size=1, max_size=3))
    def step_that_some_cannot_go_on_after(self, nth: list[int]) -> None:
        self.executor.poisoned = {self._nth_open(each) for each in nth}
        self._step()
        self.executor.poisoned = set()

    @precondition(lambda self: self.open)
    @rule()
    def executor_fails(self) -> None:
        """The plan is never committed, and the next one makes up for it."""
        swapped = {r.request_id for r in self.requests.values() if r.status is Status.SWAPPED}
        plan = self._plan()
        self.moved_in_vain = swapped & set(plan.admitted)
        self.num_failed_steps += 1
        self.executor.fail_next = True
        with pytest.raises(ExecutorFailureError):
            self.executor.execute(plan)

    def _nth_open(self, nth: int) -> str:
        return sorted(self.open)[nth % len(self.open)]

    def _decoding(self) -> set[str]:
        running = (r for r in self.requests.values() if r.status is Status.RUNNING)
        return {r.request_id for r in running if r.decoding} - self.moved_in_vain

    def _step(self, aborted_in_flight: str | None = None) -> None:
        plan = self._plan()
        result = self.executor.execute(plan)
        self.now += result.elapsed
        for request_id, reason in result.failed.items():
            delta = self.scheduler.fail(request_id, reason)
            assert delta is not None
            assert (delta.finish_reason, delta.error) == ("error", reason)
            self.open.remove(request_id)
        if aborted_in_flight in self.open:
            self._abort(aborted_in_flight)
        for delta in self.scheduler.commit(plan, result, self.now):
            assert delta.request_id in self.open
            self.outputs[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.open.remove(delta.request_id)
                self._check_finished(delta.request_id, delta.finish_reason)

    def _abort(self, request_id: str) -> None:
        delta = self.scheduler.abort(request_id)
        assert delta is not None
        assert delta.finish_reason == "abort"
        self.open.remove(request_id)

    def _plan(self) -> StepPlan:
        decoding = self._decoding()
        plan = self.scheduler.plan(self.now)
        self.moved_in_vain = set()
        if plan.empty:
            assert plan.wait_until is not None
            assert plan.wait_until > self.now
            self.now = plan.wait_until
            plan = self.scheduler.plan(self.now)
        planned = [chunk.request_id for chunk in plan.chunks]
        assert planned
        assert len(planned) == len(set(planned)) <= self.max_num_seqs
        assert plan.num_tokens == plan.rows.total <= self.budget
        self.check_plan(plan, decoding)
        return plan

    def _check_finished(self, request_id: str, reason: str) -> None:
        request = self.requests[request_id]
        longest = min(request.params.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens)
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = continuation(prompt, request.params.seed, longest)
        assert self.outputs[request_id] == expected
        assert reason == ("stop" if expected[-1] == EOS else "length")

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.has_work == bool(self.open)

    def teardown(self) -> None:
        """Every request ends, in a number of steps that the work itself bounds, and gives its memory back."""
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.has_work:
            self._step()
            self.scheduler.check_integrity()
            steps += 1
            assert steps < 20_000, "no end in sight"
        assert not self.open
        assert self.kv.num_used_blocks == self.kv.num_used_host_blocks == 0


class ContinuousMachine(SchedulerMachine):
    """Every rule and mode, with prefixes that are shared, and a host too small for all that is put aside."""

    def make_scheduler(self, max_num_seqs: int, budget: int, options: dict[str, Any]) -> Scheduler:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, recompute_seconds_per_token=1.0, **options
        )
        return ContinuousScheduler(config, self.kv, MAX_MODEL_LEN)

    def check_plan(self, plan: StepPlan, decoding: set[str]) -> None:
        planned = {chunk.request_id for chunk in plan.chunks}
        preempted = {event.request_id for event in plan.preempted}
        assert decoding <= planned | preempted, "a decoding request was passed over"
        assert not (plan.preempted and plan.admitted), "admitted in a step in which memory ran out"
        half_way = {chunk.request_id for chunk in plan.chunks if chunk.sampling is None}
        if half_way & set(plan.admitted):
            assert len(half_way) <= self.scheduler.config.max_num_partial_prefills
        assert not planned & preempted
        assert plan.rows.padding == plan.rows.ended == 0
        running = {r.request_id: r.rank for r in self.requests.values() if r.status is Status.RUNNING}
        waiting = [r.rank for r in self.requests.values() if r.status < Status.RUNNING]
        assert all(running[name] < rank for name in plan.admitted for rank in waiting), "one that waits was overtaken"
        assert all(self.requests[e.wanted_by].rank <= self.requests[e.request_id].rank for e in plan.preempted)


class StaticMachine(SchedulerMachine):
    def make_scheduler(self, max_num_seqs: int, budget: int, options: dict[str, Any]) -> Scheduler:
        self.batch: set[str] = set()
        config = StaticConfig(batch_size=max_num_seqs, timeout=0.05, max_num_batched_tokens=budget)
        return StaticScheduler(config, self.kv, MAX_MODEL_LEN)

    def check_plan(self, plan: StepPlan, decoding: set[str]) -> None:
        planned = {chunk.request_id for chunk in plan.chunks}
        assert not plan.preempted
        assert plan.rows.recomputed == 0
        if plan.admitted:
            assert planned == set(plan.admitted)
            self.batch = planned
        assert planned == self.batch, "the batch changed before it ended"
        assert len({len(chunk.token_ids) for chunk in plan.chunks}) == 1, "rows of different length"


# ---- the same lives, driven by a plain generator ----
# Many times as fast as Hypothesis, which keeps all it takes to shrink a failure; a failing life is told by its seed.

SHORTEST_LIFE, LONGEST_LIFE = 10, 200  # acts
MOST_OPEN = 40  # requests at once: more only wait


def draw(table: dict[str, Sequence[Any]], rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in table.items()}


def act(machine: SchedulerMachine, rng: random.Random) -> None:
    """One thing that happens to a scheduler."""
    if not machine.open or (rng.random() < 0.3 and len(machine.open) < MOST_OPEN):
        tail = rng.choices(TAIL_TOKENS, k=rng.randint(1, LONGEST_TAIL))
        machine.add(**draw(REQUESTS, rng), tail=tail)
        return
    acts: tuple[tuple[Callable[[], None], int], ...] = (
        (lambda: machine.steps(rng.randint(1, 4)), 12),
        (lambda: machine.abort(rng.choice(NTH)), 1),
        (lambda: machine.step_with_abort_in_flight(rng.choice(NTH)), 1),
        (lambda: machine.step_that_some_cannot_go_on_after(rng.choices(NTH, k=rng.randint(1, 3))), 1),
        (machine.executor_fails, 2),
    )
    [chosen] = rng.choices([act for act, _ in acts], [weight for _, weight in acts])
    chosen()


def live(kind: type[SchedulerMachine], seed: int) -> SchedulerMachine:
    """One scheduler, from its beginning until every request has ended."""
    rng = random.Random(seed)
    machine = kind()
    machine.start(**draw(POOLS, rng), options=draw(OPTIONS, rng))
    for _ in range(rng.randint(SHORTEST_LIFE, LONGEST_LIFE)):
        act(machine, rng)
        machine.books_add_up()
    machine.teardown()
    return machine


@pytest.mark.parametrize(
    ("kind", "num_steps", "least_preempted"), [(ContinuousMachine, 15_000, 150), (StaticMachine, 5_000, 0)]
)
def test_thousands_of_lives(kind: type[SchedulerMachine], num_steps: int, least_preempted: int) -> None:
    steps = preempted = seed = 0
    while steps < num_steps:
        plans = live(kind, seed).executor.plans
        steps += len(plans)
        preempted += sum(len(plan.preempted) for plan in plans)
        seed += 1
    assert preempted >= least_preempted


SETTINGS = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestContinuous = ContinuousMachine.TestCase
TestContinuous.settings = SETTINGS
TestStatic = StaticMachine.TestCase
TestStatic.settings = SETTINGS
