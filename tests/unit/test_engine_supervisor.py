"""Engines that fail, and those that take their place."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chairlift.config import ConfigError, EngineConfig
from chairlift.engine import supervisor
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.supervisor import Backoff, SupervisedEngine
from chairlift.scheduling.plan import SequenceDelta
from chairlift.scheduling.sampling_params import SamplingParams


class FakeRemote:
    """An engine that does what its class says, and remembers all of its kind."""

    made: list[FakeRemote]
    fails: list[Exception]  # of those to come

    def __init__(self, config: EngineConfig, logs: object = None, *, resumes: bool = False) -> None:
        self.resumes = resumes
        self.death: str | None = None
        self.wedged = self.closed = self.excused = self.told = False
        self.subscribers: list[Any] = []
        self.pid = 1000 + len(self.made)
        self.capacity = Capacity(num_blocks=100 - len(self.made), block_size=16, max_model_len=64, vocab_size=10)
        self.may_load = threading.Event()
        self.may_load.set()
        self.made.append(self)

    @classmethod
    def start(cls, config: EngineConfig, logs: object = None) -> FakeRemote:
        return cls(config, logs)

    def launch(self) -> None:
        assert threading.current_thread() is threading.main_thread()

    def wait_until_loaded(self) -> None:
        self.may_load.wait()
        if self.death is not None:
            raise EngineDeadError(self.death)
        if self.fails:
            raise self.fails.pop(0)

    async def generate(self, *_: object, **__: object) -> AsyncIterator[SequenceDelta]:
        yield SequenceDelta("0", (1,), "stop")

    def stats(self) -> EngineStats:
        return EngineStats(running=5, kv_cache_usage=0.5, alive=self.death is None, wedged=self.wedged)

    def subscribe(self, on_step: Any) -> None:
        self.subscribers.append(on_step)

    def excuse(self) -> None:
        self.excused = True

    def tell_stacks(self) -> None:
        self.told = True

    def kill(self, cause: str) -> None:
        self.death = self.death or cause
        self.wedged = False
        self.may_load.set()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> type[FakeRemote]:
    FakeRemote.made, FakeRemote.fails = [], []
    monkeypatch.setattr(supervisor, "RemoteEngine", FakeRemote)
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(supervisor, "STACKS_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.001)
    return FakeRemote


async def settled(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_delays_double_up_to_a_bound_and_begin_anew_after_a_good_run():
    backoff = Backoff()
    assert [backoff.next_delay(ran=0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff.next_delay(ran=59), backoff.next_delay(ran=60), backoff.next_delay(ran=0)] == [60, 0.5, 1]


def test_one_that_dies_is_replaced(remote: type[FakeRemote], caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        caplog.set_level(logging.INFO)
        engine = SupervisedEngine.start(EngineConfig())
        engine.watch()
        on_step = object()
        engine.subscribe(on_step)  # type: ignore[arg-type]
        assert engine.stats() == EngineStats(running=5, kv_cache_usage=0.5)
        remote.fails = [ConfigError("no room"), EngineDeadError("gone again")]
        remote.made[0].death = "out of luck"
        stats = engine.stats()
        assert stats.retry_after is not None, "from the first moment it is known that there will be another, and why"
        assert stats.last_failure == "out of luck"
        with pytest.raises(EngineDeadError, match="out of luck; another engine is being started") as refused:
            engine.generate([1], SamplingParams())
        assert refused.value.retry_after >= 1
        await settled(lambda: engine.pid is None)
        stats = engine.stats()
        assert (stats.alive, stats.running, stats.kv_cache_usage, stats.restarts) == (False, 0, 0.0, 0)
        assert stats.retry_after is not None
        with pytest.raises(EngineDeadError, match="another engine is being started") as refused:
            engine.generate([1], SamplingParams())
        assert refused.value.retry_after >= 1
        await settled(lambda: engine.pid is not None)
        assert [one.resumes for one in remote.made] == [False, True, True, True]
        assert remote.made[0].closed
        assert remote.made[3].subscribers == [on_step]
        assert engine.capacity.num_blocks == 97
        assert [delta.token_ids async for delta in engine.generate([1], SamplingParams())] == [(1,)]
        stats = engine.stats()
        assert (stats.alive, stats.restarts, stats.last_failure, stats.retry_after) == (True, 1, "gone again", None)
        await engine.close()
        assert remote.made[3].closed

    asyncio.run(main())
    text = caplog.text
    for said in ("out of luck", "attempt 1", "no room", "attempt 2", "gone again", "attempt 3", "97 KV blocks"):
        assert said in text


def test_one_that_hangs_tells_what_it_does_and_is_killed(remote: type[FakeRemote]):
    async def main() -> None:
        engine = SupervisedEngine.start(EngineConfig())
        engine.watch()
        remote.made[0].wedged = True
        await settled(lambda: len(remote.made) == 2 and engine.pid is not None)
        assert remote.made[0].told
        assert "--step-timeout" in str(engine.stats().last_failure)
        await engine.close()

    asyncio.run(main())


def test_one_that_was_stopped_together_with_its_server_is_not_blamed(
    remote: type[FakeRemote], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "FROZEN_SECONDS", -1.0)  # every look seems late

    async def main() -> None:
        engine = SupervisedEngine.start(EngineConfig())
        engine.watch()
        await settled(lambda: remote.made[0].excused)
        await engine.close()

    asyncio.run(main())


def test_none_is_started_once_the_server_is_to_end(remote: type[FakeRemote]):
    async def main() -> None:
        engine = SupervisedEngine.start(EngineConfig())
        engine.watch()
        engine.stop_restarting()
        remote.made[0].death = "killed with the server"
        await settled(lambda: remote.made[0].closed)
        await asyncio.sleep(0.01)
        assert len(remote.made) == 1
        assert engine.stats().retry_after is None
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "stop_restarting"])
def test_one_that_is_being_loaded_when_the_server_ends_is_killed(
    remote: type[FakeRemote], monkeypatch: pytest.MonkeyPatch, how: str
):
    async def main() -> None:
        engine = SupervisedEngine.start(EngineConfig())
        engine.watch()
        monkeypatch.setattr(FakeRemote, "launch", lambda self: self.may_load.clear())
        remote.made[0].death = "out of luck"
        await settled(lambda: len(remote.made) == 2 and not remote.made[1].may_load.is_set())
        if how == "stop_restarting":
            engine.stop_restarting()
            await settled(lambda: remote.made[1].death is not None)
        await engine.close()
        assert remote.made[1].death == "the server is shutting down"

    asyncio.run(main())


def test_the_first_one_loads_while_the_caller_does_other_things(remote: type[FakeRemote]):
    async def main() -> None:
        engine = SupervisedEngine.launch(EngineConfig())
        with pytest.raises(EngineDeadError, match="not loaded"):
            _ = engine.capacity
        await engine.begin()
        assert engine.capacity.num_blocks == 100
        remote.made[0].death = "out of luck"  # it is looked after from now on
        await settled(lambda: len(remote.made) == 2 and engine.pid is not None)
        await engine.close()

    asyncio.run(main())


def test_a_first_one_that_fails_is_not_tried_again(remote: type[FakeRemote]):
    async def main() -> None:
        engine = SupervisedEngine.launch(EngineConfig())
        remote.fails = [ConfigError("no room")]
        with pytest.raises(ConfigError, match="no room"):
            await engine.begin()
        await engine.close()
        assert len(remote.made) == 1

    asyncio.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_first_one_that_loads_when_the_server_ends_is_killed(
    remote: type[FakeRemote], monkeypatch: pytest.MonkeyPatch, begun: bool
):
    monkeypatch.setattr(FakeRemote, "launch", lambda self: self.may_load.clear())

    async def main() -> None:
        engine = SupervisedEngine.launch(EngineConfig())
        if begun:
            beginning = asyncio.create_task(engine.begin())
            await asyncio.sleep(0.01)
            beginning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beginning
        await engine.close()
        assert remote.made[0].death == "the server is shutting down"

    asyncio.run(main())
