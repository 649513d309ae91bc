"""Replicas that are lost, hang, drain and come back, behind the client that routes to them. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import CAPACITY, PARAMS, FakeActor, World, read, until

from chairlift.cluster import replica as replica_module
from chairlift.cluster import router as router_module
from chairlift.cluster.wire import Abort, Loaded
from chairlift.config import ConfigError
from chairlift.engine import supervisor
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.process import Failed
from chairlift.text.output import OutputStream


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(replica_module, "DRAIN_POLL_SECONDS", 0.001)
    monkeypatch.setattr(router_module, "PLACING_POLL_SECONDS", 0.001)


def test_sequences_go_to_the_replica_with_the_least_load_and_come_back():
    async def main() -> None:
        world = World()
        engine = world.engine()
        await engine.begin()
        one, two = world.actors
        reading = [asyncio.create_task(read(engine.generate([1] * n, PARAMS))) for n in (20, 5, 5)]
        await until(lambda: len(one.begun) == 1 and len(two.begun) == 2)
        assert [len(command.prompt_token_ids) for command in one.begun] == [20]
        assert engine.stats().unfinished == 3
        one.answer(7)
        one.answer(8, last=True)
        two.answer(1, 2, last=True, of=0)
        two.answer(3, last=True, of=1)
        assert await asyncio.gather(*reading) == [[7, 8], [1, 2], [3]]
        assert [replica.load for replica in engine.replicas] == [0, 0]
        await engine.close()
        assert all(actor.closed and actor.removed for actor in world.actors)

    asyncio.run(main())


def test_what_had_sent_nothing_is_begun_again_elsewhere_with_the_same_seed():
    async def main() -> None:
        world = World()
        engine = world.engine()
        await engine.begin()
        one, two = world.actors
        reading = asyncio.create_task(read(engine.generate([1, 2], replace(PARAMS, temperature=1.0))))
        await until(lambda: one.begun)
        one.die()
        await until(lambda: two.begun)
        assert one.removed
        assert two.begun[0].params == one.begun[0].params
        assert two.begun[0].params.seed is not None
        two.answer(9, last=True)
        assert await reading == [9]
        assert engine.retries == 1
        await until(lambda: engine.replicas[0].state == "up")
        stats = engine.stats()
        assert (stats.restarts, stats.alive, stats.last_failure) == (1, True, "the node is gone")
        assert world.actors[2].number == 0
        await engine.close()

    asyncio.run(main())


def test_what_had_sent_tokens_ends_with_the_reason():
    async def main() -> None:
        world = World()
        engine = world.engine()
        await engine.begin()
        one, two = world.actors
        stream = engine.generate([1, 2], PARAMS)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: one.begun)
        one.answer(5)
        assert (await reading).token_ids == (5,)
        one.die()
        with pytest.raises(EngineDeadError, match=r"replica 0 was lost: the node is gone, after the answer had begun"):
            await anext(stream)
        assert not two.begun
        await engine.close()

    asyncio.run(main())


class Bytes:
    """As much of a tokenizer as an output needs."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_an_answer_that_is_sent_as_a_whole_begins_anew(monkeypatch: pytest.MonkeyPatch):
    """Tokens had come, but the client has seen none of them."""

    class Detokenizer:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def add(self, token_ids: Sequence[int]) -> str:
            return bytes(token_ids).decode()

        def finish(self) -> str:
            return ""

    monkeypatch.setattr("chairlift.text.output.IncrementalDetokenizer", Detokenizer)

    async def main() -> None:
        world = World()
        engine = world.engine()
        await engine.begin()
        one, two = world.actors
        outputs = OutputStream(engine, Bytes(), [[1, 2]], replace(PARAMS, n=2))  # type: ignore[arg-type]
        async with outputs:
            collecting = asyncio.create_task(outputs.collect())
            await until(lambda: one.begun and two.begun)
            one.answer(65)
            await until(lambda: outputs.completion_tokens == 1)
            one.die()
            await until(lambda: len(two.begun) + sum(len(actor.begun) for actor in world.actors[2:]) == 3)
            assert any(isinstance(command, Abort) for command in two.commands)
            for actor in world.actors[1:]:
                for index in range(len(actor.begun)):
                    actor.answer(66, 67, last=True, of=index)
            sequences = await collecting
        assert [sequence.text for sequence in sequences] == ["BC", "BC"]
        assert outputs.completion_tokens == 4
        await engine.close()

    asyncio.run(main())


def test_a_sequence_that_ends_engines_does_not_end_them_all(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=6)
        await engine.begin()
        reading = asyncio.create_task(read(engine.generate([1, 2], PARAMS)))
        dead: list[FakeActor] = []
        for _ in range(router_module.MOST_ATTEMPTS):
            await until(lambda: any(actor.begun and actor not in dead for actor in world.actors))
            dead.append(next(actor for actor in world.actors if actor.begun and actor not in dead))
            request_id = dead[-1].begun[0].request_id
            dead[-1].tell(broken={request_id: "killed"}, stats=EngineStats(alive=False, retry_after=2.0))
        with pytest.raises(EngineDeadError, match=r"the engine of replica \d failed: killed"):
            await reading
        assert len({actor.number for actor in dead}) == router_module.MOST_ATTEMPTS == 3
        assert sum(replica.takes_requests for replica in engine.replicas) == 3
        await engine.close()

    asyncio.run(main())


def test_without_any_replica_requests_are_told_when_to_come_back():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        world.room.clear()
        world.actors[0].die("power failure")
        await until(lambda: len(world.actors) == 2)
        stats = engine.stats()
        assert not stats.alive
        assert stats.retry_after is not None
        with pytest.raises(EngineDeadError, match="no replica takes requests; power failure") as refused:
            await read(engine.generate([1], PARAMS))
        assert refused.value.retry_after >= 1
        assert not refused.value.elsewhere
        assert engine.capacity == CAPACITY, "checks of requests go by what was there"
        engine.stop_restarting()
        assert engine.stats().retry_after is None
        await engine.close()

    asyncio.run(main())


def test_one_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_module, "SILENT_SECONDS", 0.05)

    async def main() -> None:
        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        await until(lambda: len(world.actors) > 1)
        assert world.actors[0].removed
        assert "did not answer within 0.05 seconds" in str(engine.stats().last_failure)
        await engine.close()

    asyncio.run(main())


def test_a_server_that_was_stopped_does_not_give_its_replicas_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_module, "SILENT_SECONDS", 0.3)

    async def main() -> None:
        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        (one,) = world.actors
        reading = asyncio.create_task(read(engine.generate([1], PARAMS)))
        await until(lambda: one.begun)
        time.sleep(0.4)
        # What was said meanwhile comes by another thread, and so after the timers that have run out.
        await asyncio.sleep(0.005)
        one.answer(4, last=True)
        assert await asyncio.wait_for(reading, 30) == [4]
        assert (len(world.actors), engine.retries) == (1, 0)
        await engine.close()

    asyncio.run(main())


def test_leaving_a_stream_aborts_it():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        (one,) = world.actors
        reading = asyncio.create_task(read(engine.generate([1], PARAMS)))
        await until(lambda: one.begun)
        reading.cancel()
        await until(lambda: len(one.commands) == 2)
        assert one.commands[1] == Abort(one.begun[0].request_id)
        assert engine.stats().unfinished == engine.replicas[0].load == 0
        one.answer(1)  # it crossed the abort
        reading = asyncio.create_task(read(engine.generate([2], PARAMS)))
        await until(lambda: len(one.begun) == 2)
        one.answer(4, last=True)
        assert await reading == [4]
        await engine.close()

    asyncio.run(main())


def test_going_down_drains_and_going_up_places():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=3)
        await engine.begin()
        reading = [asyncio.create_task(read(engine.generate([1], PARAMS))) for _ in range(3)]
        await until(lambda: all(actor.begun for actor in world.actors))
        await engine.scale(1)
        assert [replica.state for replica in engine.replicas] == ["up", "draining", "draining"]
        more = [asyncio.create_task(read(engine.generate([1], PARAMS))) for _ in range(2)]
        await until(lambda: len(world.actors[0].begun) == 3)
        for actor in world.actors[1:]:
            assert not actor.removed
            actor.answer(6, last=True)
        await until(lambda: len(engine.replicas) == 1)
        assert all(actor.closed and actor.removed for actor in world.actors[1:])
        await engine.scale(2)
        await until(lambda: [replica.state for replica in engine.replicas] == ["up", "up"])
        assert [replica.number for replica in engine.replicas] == [0, 3]
        for index in range(3):
            world.actors[0].answer(6, last=True, of=index)
        assert await asyncio.gather(*reading, *more) == [[6]] * 5
        with pytest.raises(ConfigError, match="no room for 11"):
            await engine.scale(11)
        with pytest.raises(ConfigError, match="replicas must be from 1"):
            await engine.scale(0)
        assert engine.target == 2
        await engine.close()

    asyncio.run(main())


def test_a_server_that_is_about_to_end_places_none():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        scaling = asyncio.create_task(engine.scale(3))
        await asyncio.sleep(0)  # it asks for room
        engine.stop_restarting()
        with pytest.raises(ConfigError, match="shutting down"):
            await scaling
        assert (len(world.actors), engine.target) == (1, 1)
        await engine.close()

    asyncio.run(main())


def test_of_those_that_can_go_the_ones_that_are_lost_go_first_and_stay_away():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=2)
        await engine.begin()
        world.room.clear()
        world.actors[0].die()
        await until(lambda: len(world.actors) == 3)
        await engine.scale(1)
        await until(lambda: [replica.number for replica in engine.replicas] == [1])
        assert world.actors[2].removed
        await engine.close()

    asyncio.run(main())


def test_one_that_drains_and_is_lost_is_gone():
    async def main() -> None:
        world = World()
        engine = world.engine(replicas=2)
        await engine.begin()
        reading = [asyncio.create_task(read(engine.generate([1], PARAMS))) for _ in range(2)]
        await until(lambda: all(actor.begun for actor in world.actors))
        await engine.scale(1)
        world.actors[1].die()
        await until(lambda: len(engine.replicas) == 1)
        assert len(world.actors) == 2
        await until(lambda: len(world.actors[0].begun) == 2)
        for index in range(2):
            world.actors[0].answer(3, last=True, of=index)
        assert await asyncio.gather(*reading) == [[3], [3]]
        await engine.close()

    asyncio.run(main())


def test_the_first_failure_to_load_is_told_and_later_ones_are_tried_again(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        world = World()
        world.loads = [Failed("no such model", expected=True)]
        engine = world.engine(replicas=2)
        with pytest.raises(ConfigError, match="no such model"):
            await engine.begin()
        assert all(actor.removed for actor in world.actors)

        world = World()
        world.loads = [Failed("killed")]
        with pytest.raises(EngineDeadError, match="killed"):
            await world.engine(replicas=1).begin()

        world = World()
        engine = world.engine(replicas=1)
        await engine.begin()
        world.loads = [Failed("not yet", expected=True), Failed("nor now"), Loaded(CAPACITY, "there")]
        await engine.scale(2)
        await until(lambda: engine.replicas[1].state == "up")
        assert engine.replicas[1].node == "there"
        await engine.close()

    asyncio.run(main())


def test_replicas_that_find_no_place_are_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_module, "PLACE_SECONDS", 0.01)

    async def main() -> None:
        world = World()
        world.room.clear()
        with pytest.raises(ConfigError, match="2 of 2 replicas found no place"):
            await world.engine().begin()
        assert all(actor.removed for actor in world.actors)

    asyncio.run(main())
