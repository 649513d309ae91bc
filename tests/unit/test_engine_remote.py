"""The server's end of an engine in its own process."""

from __future__ import annotations

import asyncio
import pickle

from chairlift.engine.remote import _Stream
from chairlift.scheduling.plan import RequestTiming, SequenceDelta


def test_a_delta_arrives_as_it_was_sent():
    delta = SequenceDelta("a", (1, 2), "stop", 2, "no", RequestTiming(0.5, admitted=1.0, preemptions=3))
    assert pickle.loads(pickle.dumps(delta)) == delta


def test_a_slow_reader_gets_all_that_it_missed_in_one():
    timing = RequestTiming(0.0, admitted=1.0, cached_tokens=16)

    async def read() -> SequenceDelta:
        stream = _Stream()
        stream.push(SequenceDelta("a", (1,), timing=timing))
        stream.push(SequenceDelta("a", (2,)))
        stream.push(SequenceDelta("a", (3,)))
        return await stream.next()

    assert asyncio.run(read()) == SequenceDelta("a", (1, 2, 3), timing=timing)
