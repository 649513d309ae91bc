"""Drives a scheduler by hand, under no clock but a counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.checking_executor import EOS, CheckingExecutor, continuation

from chairlift import SamplingParams
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import SequenceDelta, StepPlan
from chairlift.scheduling.request import Request
from chairlift.scheduling.scheduler import Scheduler


def request(
    request_id: str, prompt: int | Sequence[int], max_tokens: int, *, arrival: float = 0.0, priority: int = 0, **params
) -> Request:
    """A request whose prompt is given, or is ``prompt`` tokens of its own."""
    tokens = [hash((request_id, i)) % EOS for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = {"seed": 0, "ignore_eos": True, **params}
    return Request(
        request_id,
        tokens,
        SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=(EOS,),
        arrival=arrival,
        priority=priority,
    )


class Driver:
    """A scheduler, a checking executor, and everything that came out of them."""

    def __init__(
        self,
        make: Callable[[KVManager], Scheduler],
        *,
        num_blocks: int = 1000,
        block_size: int = 4,
        num_host_blocks: int = 0,
        caching: bool = False,
    ) -> None:
        cache = PrefixCache(num_blocks, block_size, salt=b"test") if caching else None
        self.kv = KVManager(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=cache)
        self.scheduler = make(self.kv)
        self.executor = CheckingExecutor(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.deltas: list[SequenceDelta] = []
        self.finished_in: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        if plan.empty:
            return plan
        result = self.executor.execute(plan)
        self.now += result.elapsed
        for delta in self.scheduler.commit(plan, result, self.now):
            self.deltas.append(delta)
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished_in[delta.request_id] = plan.step
        self.scheduler.check_integrity()
        return plan

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")

    def planned(self, plan: StepPlan) -> dict[str, int]:
        """Rows of each sequence in a step."""
        return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def memory_driver(
    num_blocks: int = 1000, *, budget: int = 64, max_num_seqs: int = 8, host: int = 0, caching: bool = True, **config
) -> Driver:
    """One of continuous batching, over so many blocks of four tokens on the device and on the host."""
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **config)
    return Driver(
        lambda kv: ContinuousScheduler(limits, kv, 4096),
        num_blocks=num_blocks,
        num_host_blocks=host,
        caching=caching,
    )


def assert_right_tokens(driver: Driver, *requests: Request) -> None:
    """That each request, none of which ended early, was answered what it would have been alone."""
    for r in requests:
        prompt = r.token_ids[: r.num_prompt_tokens]
        assert driver.tokens[r.request_id] == continuation(prompt, r.params.seed, r.params.max_tokens, ())
