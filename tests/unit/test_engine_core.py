"""The engine's loop: what one request does must not end the others."""

from __future__ import annotations

from support.checking_executor import CheckingExecutor, continuation

from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AbortRequest, AddRequest, Command, EngineCore
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import SequenceDelta
from chairlift.scheduling.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)


def run(*commands: Command, executor: CheckingExecutor | None = None) -> dict[str, list[SequenceDelta]]:
    """What comes out for each request."""
    scheduler = ContinuousScheduler(SchedulerConfig(max_num_seqs=4), KVManager(20, 4), 64)
    inbox = list(commands)

    def drain() -> list[Command]:
        taken = inbox[:]
        inbox.clear()
        return taken

    core = EngineCore(scheduler, executor or CheckingExecutor(20, 4), VirtualClock(), drain)
    deltas: dict[str, list[SequenceDelta]] = {}
    while inbox or core.has_work:
        for delta in core.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
        scheduler.check_integrity()
    assert scheduler.kv.num_used_blocks == 0
    return deltas


def tokens(deltas: list[SequenceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_a_request_that_cannot_be_made_is_refused_and_the_others_go_on():
    deltas = run(
        AddRequest("good", [1, 2, 3], PARAMS, 0.0),
        AddRequest("empty", [], PARAMS, 0.0),
        AddRequest("unseeded", [1], SamplingParams(max_tokens=5), 0.0),
        AddRequest("long", [1] * 64, PARAMS, 0.0),
    )
    assert tokens(deltas["good"]) == continuation([1, 2, 3], 0, 5, ())
    for name, reason in (("empty", "at least one token"), ("unseeded", "seed"), ("long", "no room to generate")):
        [delta] = deltas[name]
        assert delta.finish_reason == "error"
        assert reason in str(delta.error)


def test_what_was_computed_for_one_that_cannot_go_on_is_found_by_nobody():
    """Nor if its client hangs up in that very step: the failure is seen first."""
    prompt = list(range(12))
    cache = PrefixCache(40, 4, salt=b"")
    executor = CheckingExecutor(40, 4)
    inbox: list = [[AddRequest("good", [*prompt, 1], PARAMS, 0.0)]]
    scheduler = ContinuousScheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), KVManager(40, 4, prefix_cache=cache), 64
    )
    core = EngineCore(scheduler, executor, VirtualClock(), lambda: inbox.pop(0) if inbox else [])
    while inbox or core.has_work:
        core.step()
    executor.poisoned = {"bad"}
    inbox += [[AddRequest("bad", [*prompt, 2], PARAMS, core.clock.now())], [AbortRequest("bad")]]
    output = core.step()
    assert output.record is not None
    assert output.record.cached_tokens == 12
    assert [(delta.request_id, delta.finish_reason) for delta in output.deltas] == [("bad", "error")]
    inbox.append([AddRequest("next", [*prompt, 3], PARAMS, core.clock.now())])
    output = core.step()
    assert output.record is not None
    assert output.record.cached_tokens == 0
    scheduler.check_integrity()


def test_a_request_that_the_model_cannot_go_on_with_ends_alone():
    executor = CheckingExecutor(20, 4)
    executor.poisoned = {"bad"}
    deltas = run(
        AddRequest("good", [1, 2, 3], PARAMS, 0.0),
        AddRequest("bad", [4, 5], PARAMS, 0.0),
        AddRequest("other", [6, 7], PARAMS, 0.0),
        executor=executor,
    )
    [delta] = deltas["bad"]
    assert (delta.finish_reason, delta.error, delta.token_ids) == ("error", "poisoned", ())
    assert tokens(deltas["good"]) == continuation([1, 2, 3], 0, 5, ())
    assert tokens(deltas["other"]) == continuation([6, 7], 0, 5, ())
