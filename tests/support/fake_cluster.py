"""A cluster without Ray: actors that do as a test tells them, for the client that routes to replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from chairlift.cluster.config import ClusterConfig
from chairlift.cluster.router import RoutedEngine
from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.client import EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.process import Failed
from chairlift.scheduling.plan import SequenceDelta
from chairlift.scheduling.sampling_params import SamplingParams

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


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


async def read(stream: AsyncIterator[SequenceDelta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]
