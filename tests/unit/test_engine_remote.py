"""The server's end of an engine in its own process."""

from __future__ import annotations

import asyncio
import pickle
import time

from chairlift.config import EngineConfig
from chairlift.engine.core import StepOutput
from chairlift.engine.delta_stream import DeltaStream
from chairlift.engine.executor import Capacity
from chairlift.engine.remote import RemoteEngine
from chairlift.scheduling.plan import RequestTiming, SequenceDelta
from chairlift.scheduling.sampling_params import SamplingParams


def test_a_delta_arrives_as_it_was_sent():
    delta = SequenceDelta("a", (1, 2), "stop", 2, "no", RequestTiming(0.5, admitted=1.0, preemptions=3))
    assert pickle.loads(pickle.dumps(delta)) == delta


def test_a_slow_reader_gets_all_that_it_missed_in_one():
    timing = RequestTiming(0.0, admitted=1.0, cached_tokens=16)

    async def read() -> SequenceDelta:
        stream = DeltaStream()
        stream.push(SequenceDelta("a", (1,), timing=timing))
        stream.push(SequenceDelta("a", (2,)))
        stream.push(SequenceDelta("a", (3,)))
        return await stream.next()

    assert asyncio.run(read()) == SequenceDelta("a", (1, 2, 3), timing=timing)


def test_clients_that_leave_do_not_make_an_engine_that_hangs_seem_idle():
    """Each gives up before --step-timeout; the engine has not answered the first of them yet."""
    engine = RemoteEngine(EngineConfig(step_timeout=10.0))
    engine._capacity = Capacity(num_blocks=4, block_size=16, max_model_len=64, vocab_size=10)

    async def come_and_leave() -> None:
        task = asyncio.ensure_future(anext(engine.generate([1], SamplingParams(seed=0))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(come_and_leave())
    assert not engine.stats().wedged
    engine._busy_since -= 11
    engine._last_word -= 11
    asyncio.run(come_and_leave())
    assert engine.stats().wedged
    engine._receive(StepOutput())
    assert not engine.stats().wedged


def test_an_engine_that_waits_for_its_batch_to_fill_does_not_hang():
    engine = RemoteEngine(EngineConfig(step_timeout=10.0))
    engine._capacity = Capacity(num_blocks=4, block_size=16, max_model_len=64, vocab_size=10)
    engine._streams["0"] = DeltaStream()
    for waits_until, wedged in ((time.monotonic() + 50, False), (None, True)):
        engine._receive(StepOutput(wait_until=waits_until))
        engine._busy_since -= 11
        engine._last_word -= 11
        assert engine.stats().wedged is wedged
