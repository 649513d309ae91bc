"""Replicas that are lost, hang, drain and come back, behind the client that routes to them. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chairlift.cluster import host as host_module
from chairlift.cluster import replica as replica_module
from chairlift.cluster import router as router_module
from chairlift.cluster.config import ClusterConfig
from chairlift.cluster.host import EngineHost
from chairlift.cluster.metrics import ReplicaCollector
from chairlift.cluster.router import RoutedEngine
from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine import supervisor
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.process import Failed
from chairlift.scheduling.plan import RowCounts, SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.text.output import OutputStream

CAPACITY = Capacity(num_blocks=10, block_size=4, max_model_len=64, vocab_size=258)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


class FakeActor:
    """A replica that answers when a test says so, and remembers what it was told."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.world = world
        self.commands: list[Begin | Abort] = []
        self.removed = self.closed = False
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()
        world.actors.append(self)

    async def placed(self) -> None:
        await self.world.room.wait()

    async def start(self) -> Loaded | Failed:
        await self.world.may_load.wait()
        return self.world.loads.pop(0) if self.world.loads else Loaded(CAPACITY, f"node-{self.number}")

    async def submit(self, commands: Sequence[Begin | Abort]) -> None:
        self.commands += commands

    async def poll(self) -> News:
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def close(self) -> None:
        self.closed = True

    async def remove(self) -> None:
        self.removed = True

    def tell(self, **news: Any) -> None:
        self._news.put_nowait(News(**{"stats": EngineStats(), "capacity": CAPACITY, **news}))

    def answer(self, *token_ids: int, last: bool = False, of: int = -1) -> None:
        request_id = self.begun[of].request_id
        self.tell(deltas={request_id: SequenceDelta(request_id, token_ids, "length" if last else None)})

    def die(self, cause: str = "the node is gone") -> None:
        self._news.put_nowait(ConnectionError(cause))

    @property
    def begun(self) -> list[Begin]:
        return [command for command in self.commands if isinstance(command, Begin)]


class World:
    """What there is: actors, room for more, and what loading them comes to."""

    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.room, self.may_load = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.may_load.set()
        self.loads: list[Loaded | Failed] = []
        self.most = 10

    def check_room(self, count: int) -> None:
        if count > self.most:
            raise ConfigError(f"no room for {count}")

    def engine(self, replicas: int = 2, routing: str = "least-load", **config: Any) -> RoutedEngine:
        cluster = ClusterConfig(replicas=replicas, routing=routing)
        return RoutedEngine(EngineConfig(**config), cluster, lambda number: FakeActor(number, self), self.check_room)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(replica_module, "DRAIN_POLL_SECONDS", 0.001)
    monkeypatch.setattr(router_module, "PLACING_POLL_SECONDS", 0.001)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


async def read(stream: AsyncIterator[SequenceDelta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


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


def test_metrics_tell_the_replicas_apart():
    async def main() -> None:
        world = World()
        engine = world.engine()
        await engine.begin()
        steps: list[StepRecord] = []
        engine.subscribe(steps.append)
        record = StepRecord(0, 0.0, 0.5, RowCounts(prefill=3, decode=1), looked_up_tokens=10, cached_tokens=4)
        world.actors[1].tell(records=[record, record], stats=EngineStats(running=2, kv_cache_usage=0.5))
        await until(lambda: len(steps) == 2)
        assert (engine.stats().running, engine.stats().kv_cache_usage) == (2, 0.25)
        registry = CollectorRegistry()
        registry.register(ReplicaCollector(engine, "m"))
        lines = generate_latest(registry).decode().splitlines()
        for name, value in (
            ("steps_total", 2), ("step_seconds_total", 1), ("step_rows_total", 8), ("prefix_cache_queries_total", 20),
            ("prefix_cache_hits_total", 8), ("requests_running", 2), ("up", 1), ("kv_cache_usage_perc", 0.5),
        ):  # fmt: skip
            assert f'chairlift:replica_{name}{{model_name="m",replica="1"}} {float(value)}' in lines
        assert 'chairlift:replica_steps_total{model_name="m",replica="0"} 0.0' in lines
        assert 'chairlift:replica_info{model_name="m",node="node-1",replica="1",state="up"} 1.0' in lines
        world.actors[1].die()
        await until(lambda: engine.replicas[1].restarts == 1 and engine.replicas[1].state == "up")
        lines = generate_latest(registry).decode().splitlines()
        assert 'chairlift:replica_steps_total{model_name="m",replica="1"} 2.0' in lines, "a counter does not go back"
        assert 'chairlift:replica_restarts_total{model_name="m",replica="1"} 1.0' in lines
        await engine.close()

    asyncio.run(main())


class FakeEngine:
    """An engine whose sequences answer their own prompt, a token a turn, until told to break."""

    made: FakeEngine

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.capacity = CAPACITY
        self.aborted = 0
        self.go = asyncio.Event()
        self.subscribers: list[Any] = []
        self.closed = False
        FakeEngine.made = self

    @classmethod
    def start(cls, config: EngineConfig, logs: object) -> FakeEngine:
        if config.model == "missing":
            raise ConfigError("no such model")
        return cls(config)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **_: object
    ) -> AsyncIterator[SequenceDelta]:
        try:
            await self.go.wait()
            for token in prompt[:-1]:
                yield SequenceDelta("7", (token,))
            if prompt[-1] == 0:
                raise EngineDeadError("out of luck")
            yield SequenceDelta("7", (prompt[-1],), "length")
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    def subscribe(self, on_step: Any) -> None:
        self.subscribers.append(on_step)

    def watch(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(running=1)

    async def close(self) -> None:
        self.closed = True


def test_the_actor_gathers_what_a_step_brings_into_one_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_module, "SupervisedEngine", FakeEngine)

    async def main() -> None:
        host = EngineHost(2, EngineConfig(step_log="steps.jsonl"), 1, None)
        with pytest.raises(EngineDeadError, match="not loaded"):
            await host.poll()
        loaded = await host.start()
        assert isinstance(loaded, Loaded)
        engine = FakeEngine.made
        assert (engine.config.step_log, engine.config.num_threads) == ("steps.2.jsonl", 1)
        await host.submit([Begin("a", (1, 2), PARAMS), Begin("b", (5, 0), PARAMS), Begin("c", (1,), PARAMS)])
        await asyncio.sleep(0)
        await host.submit([Abort("c"), Abort("unknown")])
        await asyncio.sleep(0)
        record = StepRecord(0, 0.0, 0.5)
        engine.go.set()
        engine.subscribers[0](record)
        news = await host.poll()
        assert news.deltas["a"].token_ids == (1, 2)
        assert news.deltas["a"].finish_reason == "length"
        assert news.deltas["b"].token_ids == (5,)
        assert news.broken == {"b": "out of luck"}
        assert "c" not in news.deltas
        assert engine.aborted == 1
        assert news.records == [record]
        monkeypatch.setattr(host_module, "HEARTBEAT_SECONDS", 0.01)
        assert await host.poll() == News(EngineStats(running=1), CAPACITY), "a heartbeat"
        await host.close()
        assert engine.closed

        failed = await EngineHost(0, EngineConfig(model="missing"), None, None).start()
        assert failed == Failed("no such model", expected=True)
        failed = await EngineHost(0, EngineConfig(), 1000, None).start()
        assert isinstance(failed, Failed)
        assert "--num-threads 1000 is more than" in failed.message

    asyncio.run(main())
