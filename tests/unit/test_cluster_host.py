"""What goes on at a replica's end, and what the metrics tell of each. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.fake_cluster import CAPACITY, PARAMS, World, until

from chairlift.cluster import host as host_module
from chairlift.cluster.host import EngineHost
from chairlift.cluster.metrics import ReplicaCollector
from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine import supervisor
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.process import Failed
from chairlift.scheduling.plan import RowCounts, SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams


def test_metrics_tell_the_replicas_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.001)

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
        await host.submit([Begin("d", (1,), PARAMS), Abort("d")])  # it never had a turn
        record = StepRecord(0, 0.0, 0.5)
        engine.go.set()
        engine.subscribers[0](record)
        news = await host.poll()
        assert news.deltas["a"].token_ids == (1, 2)
        assert news.deltas["a"].finish_reason == "length"
        assert news.deltas["b"].token_ids == (5,)
        assert news.broken == {"b": "out of luck"}
        assert not {"c", "d"} & news.deltas.keys()
        assert not host._running, "nothing is kept of those that ended"
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
