"""Each prompt token's logprob is due once, whatever happens to the request on its way."""

from __future__ import annotations

import pytest
from support.checking_executor import EOS, CheckingExecutor
from support.driving import Driver, request

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import StepPlan, StepResult, TokenLogprob
from chairlift.scheduling.request import Request
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.scheduling.scheduler import RequestRefusedError, Scheduler
from chairlift.scheduling.static import StaticConfig, StaticScheduler


class ScoringExecutor(CheckingExecutor):
    """Tells as a token's logprob what its sequence held before it, which it reads from the KV cache."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        size = self.capacity().block_size
        told = {}
        for chunk in plan.chunks:
            if chunk.prompt_targets is None:
                continue
            first = chunk.start + chunk.prompt_targets.first_row
            told[chunk.request_id] = [
                TokenLogprob(
                    token,
                    float(hash(tuple(self._device[chunk.block_table[p // size]][p % size] for p in range(row + 1)))),
                    chunk.prompt_targets.num_top,
                )
                for row, token in enumerate(chunk.prompt_targets.token_ids, first)
            ]
            assert chunk.prompt_targets.first_row + len(chunk.prompt_targets.token_ids) <= len(chunk.token_ids)
        logprobs = [
            TokenLogprob(token, 0.0, 1) if chunk.sampling.logprobs is not None else None
            for chunk, token in zip((c for c in plan.chunks if c.sampling is not None), result.token_ids, strict=True)
        ]
        return StepResult(result.token_ids, result.elapsed, result.failed, logprobs, told)


def expected(r: Request) -> list[TokenLogprob]:
    prompt = r.token_ids[: r.num_prompt_tokens]
    return [
        TokenLogprob(token, float(hash(tuple(enumerate(prompt[:position])))), r.params.prompt_logprobs)
        for position, token in enumerate(prompt)
        if position
    ]


def drive(make, *requests: Request, num_blocks: int = 1000, host: int = 0, caching: bool = False) -> Driver:
    driver = Driver(make, num_blocks=num_blocks, num_host_blocks=host, caching=caching)
    driver.executor = ScoringExecutor(num_blocks, 4, num_host_blocks=host)
    driver.add(*requests)
    driver.run()
    return driver


def continuous(budget: int = 64, max_num_seqs: int = 4, **options):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **options)
    return lambda kv: ContinuousScheduler(config, kv, 400)


def static(kv: KVManager) -> Scheduler:
    return StaticScheduler(StaticConfig(batch_size=3, timeout=0.0, max_num_batched_tokens=24), kv, 400)


def told(driver: Driver, r: Request) -> list[TokenLogprob]:
    return [logprob for d in driver.deltas if d.request_id == r.request_id for logprob in d.prompt_logprobs]


def check(driver: Driver, *requests: Request) -> None:
    for r in requests:
        if r.params.prompt_logprobs is not None:
            assert told(driver, r) == expected(r)
        else:
            assert told(driver, r) == []
        tokens = r.token_ids[r.num_prompt_tokens :]
        assert driver.tokens.get(r.request_id, []) == tokens
        sampled = [logprob.token_id for d in driver.deltas if d.request_id == r.request_id for logprob in d.logprobs]
        assert sampled == (tokens if r.params.logprobs is not None else [])


def mixed() -> list[Request]:
    return [
        request("a", 23, 20, prompt_logprobs=2, logprobs=1),
        request("b", 5, 25),
        request("c", 17, 0, prompt_logprobs=0),
        request("d", 1, 15, prompt_logprobs=1, logprobs=0),
        request("e", 12, 0),
        request("f", 30, 10, prompt_logprobs=0),
    ]


@pytest.mark.parametrize("budget", [4, 5, 9, 64])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [11, 1000])
def test_each_is_told_once_and_rightly(budget: int, mode: str, num_blocks: int) -> None:
    requests = mixed()
    driver = drive(
        continuous(budget, preemption_mode=mode), *requests, num_blocks=num_blocks, host=100 if mode == "swap" else 0
    )
    check(driver, *requests)
    assert any(plan.preempted for plan in driver.plans) == (num_blocks == 11)


def test_all_have_come_when_the_first_token_does() -> None:
    requests = mixed()
    driver = drive(continuous(5), *requests)
    for r in requests:
        deltas = [d for d in driver.deltas if d.request_id == r.request_id]
        first = next((i for i, d in enumerate(deltas) if d.token_ids), len(deltas) - 1)
        assert not any(d.prompt_logprobs for d in deltas[first + 1 :])


def test_static_batches_tell_them_with_the_answer() -> None:
    requests = mixed()
    driver = drive(static, *requests)
    check(driver, *requests)
    assert len(driver.deltas) == len(requests)


def test_a_cached_prompt_is_computed_as_far_as_logprobs_are_due() -> None:
    tokens = [7] * 21
    first, again, plain = (
        request("first", tokens, 2),
        request("again", tokens, 2, prompt_logprobs=0),
        request("plain", tokens, 2),
    )
    make = continuous(max_num_seqs=1)
    driver = drive(make, first, again, plain, caching=True)
    check(driver, first, again, plain)
    assert [r.timing.cached_tokens for r in (first, again, plain)] == [0, 0, 20]


def test_what_was_told_before_a_preemption_may_come_from_the_cache_after_it() -> None:
    early, late = request("early", 8, 30), request("late", 22, 12, prompt_logprobs=0)
    driver = drive(continuous(preemption_mode="recompute"), early, late, num_blocks=11, caching=True)
    check(driver, early, late)
    assert late.timing.preemptions > 0
    assert sum(plan.num_cached_tokens for plan in driver.plans) > 0


def test_a_prompt_alone_ends_when_it_is_computed() -> None:
    whole = request("whole", 400, 0, prompt_logprobs=0)
    driver = drive(continuous(100), whole, num_blocks=100)
    check(driver, whole)
    [last] = [d for d in driver.deltas if d.finish_reason]
    assert (last.token_ids, last.finish_reason) == ((), "length")
    assert len(driver.plans) == 4
    assert not any(chunk.sampling for plan in driver.plans for chunk in plan.chunks)
    with pytest.raises(RequestRefusedError, match="no room to generate"):
        driver.scheduler.add(request("longer", 401, 0))
    with pytest.raises(RequestRefusedError, match="need 100 KV blocks of 4 tokens, but there are 99"):
        continuous()(KVManager(99, 4)).add(request("large", 400, 0))


def test_a_context_comes_only_with_what_needs_it_and_is_no_copy() -> None:
    plain, penalized = request("plain", 5, 3), request("penalized", 9, 3, presence_penalty=1.0, stop_token_ids=(5,))
    driver = drive(continuous(8), plain, penalized)
    chunks = [chunk for plan in driver.plans for chunk in plan.chunks]
    assert all(chunk.context is None for chunk in chunks if chunk.request_id == "plain")
    for chunk in chunks:
        if chunk.request_id == "penalized":
            assert (chunk.context is None) == (chunk.sampling is None)
            if chunk.context is not None:
                assert chunk.context.token_ids is penalized.token_ids
                assert chunk.context.num_prompt_tokens == 9
                assert chunk.context.stop_token_ids == {5, EOS}


def test_stop_tokens_of_a_context_include_ends_that_are_ignored() -> None:
    r = Request("r", [1], SamplingParams(min_tokens=2, ignore_eos=True, seed=0), eos_token_ids=(EOS,))
    assert r.context is not None
    assert r.context.stop_token_ids == {EOS}
