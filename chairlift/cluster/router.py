"""The client of a server whose engine is many: it sends each sequence to a replica, and to another if that is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from chairlift.cluster.config import ClusterConfig, check_replicas
from chairlift.cluster.replica import Actor, Replica
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.routing import make_router
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""Replicas that a sequence is tried on: enough for one that meets a lost node twice before that is noticed, and few
enough that one which kills engines does not kill them all."""
PLACE_SECONDS = 60.0
"""Time that Ray gets to find places for the first replicas; it may have to start processes."""
PLACING_POLL_SECONDS = 0.1
FIRST_GUESS = 128.0
"""Tokens that an answer is expected to have, before there was one."""
GUESS_OVER = 100
"""Answers over which their mean length is taken, the later ones counting more."""


class RoutedEngine:
    """An :class:`~chairlift.engine.client.AsyncEngineClient` over replicas.

    Args:
        config: of each engine.
        cluster: how many replicas, and how they are routed to.
        place: places a replica.
        check_room: raises a ConfigError unless there is room for so many replicas.
        disconnect: called at the end.
    """

    def __init__(
        self,
        config: EngineConfig,
        cluster: ClusterConfig,
        place: Callable[[int], Actor],
        check_room: Callable[[int], None],
        disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._place = place
        self._check_room = check_room
        self._disconnect = disconnect
        self._seeds = random.Random(config.seed)  # noqa: S311 - noise for sampling, not a secret
        self._numbers = itertools.count()
        self._replicas: dict[int, Replica] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._subscribers: list[Callable[[StepRecord], None]] = []
        self._capacity: Capacity | None = None
        self._removed_restarts = 0
        self._answer_tokens = FIRST_GUESS
        self._stopping = False
        self.target = 0
        self.retries = 0
        self._router = make_router(cluster.routing, block_size=config.block_size, num_blocks=1)

    async def begin(self) -> None:
        """Places the replicas and waits until all take requests.

        Raises:
            ConfigError: there is no room, or the settings or the model cannot work.
            EngineDeadError: a replica ended while loading.
        """
        await asyncio.to_thread(self._check_room, self._cluster.replicas)
        self.target = self._cluster.replicas
        placing = asyncio.create_task(self._watch_placing())
        try:
            await asyncio.gather(placing, *(self._add().start() for _ in range(self.target)))
        except BaseException:
            placing.cancel()
            await self.close()
            raise
        capacity = self.capacity
        self._router = make_router(
            self._cluster.routing, block_size=capacity.block_size, num_blocks=capacity.num_blocks
        )

    async def _watch_placing(self) -> None:
        """Raises a ConfigError if a replica finds no place, though there are nodes that are large enough."""
        deadline = time.monotonic() + PLACE_SECONDS
        while waiting := [replica.number for replica in self.replicas if replica.state == "placing"]:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{len(waiting)} of {self.target} replicas found no place within {PLACE_SECONDS:g} seconds: the "
                    "nodes are large enough, but something else holds what they need (see ray status); end that, or "
                    "lower --replicas"
                )
            await asyncio.sleep(PLACING_POLL_SECONDS)

    def _add(self) -> Replica:
        number = next(self._numbers)
        added = self._replicas[number] = Replica(number, self._place, self._on_step, self._router_forgets)
        return added

    def _router_forgets(self, number: int) -> None:
        self._router.forget(number)

    def _on_step(self, record: StepRecord) -> None:
        for on_step in self._subscribers:
            on_step(record)

    # ---- an engine ----

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, those that drain included, in order of their number."""
        return tuple(self._replicas.values())

    @property
    def capacity(self) -> Capacity:
        """Of the replica with the least room: what fits there fits everywhere."""
        known = [replica.capacity for replica in self._replicas.values() if replica.capacity is not None]
        if known:
            self._capacity = min(known, key=lambda capacity: (capacity.max_model_len, capacity.num_blocks))
        if self._capacity is None:
            raise EngineDeadError("no replica is loaded")
        return self._capacity

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        """Runs one sequence on one replica, and on another if that is lost before anything came of it.

        Raises:
            EngineDeadError: no replica takes requests, or the one that had begun the answer was lost.
        """
        if params.seed is None:  # here, so that another replica draws the same
            params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        tried: set[int] = set()
        while True:
            replica, work = self._choose(prompt_token_ids, params, cache_salt, tried)
            tried.add(replica.number)
            begun = False
            replica.load += work
            try:
                stream = replica.generate(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
                count = 0
                async with aclosing(stream):
                    async for delta in stream:
                        begun = True
                        count += len(delta.token_ids)
                        if delta.finish_reason is not None:
                            self._answer_tokens += (count - self._answer_tokens) / GUESS_OVER
                        yield delta
                return
            except EngineDeadError as error:
                if begun:
                    raise EngineDeadError(
                        f"{error}, after the answer had begun", error.retry_after, elsewhere=self._any_takes_requests
                    ) from error
                if len(tried) == MOST_ATTEMPTS:
                    raise
                logger.warning("a sequence is tried on another replica: %s", error)
                self.retries += 1
            finally:
                replica.load -= work

    def _choose(
        self, prompt: Sequence[int], params: SamplingParams, cache_salt: str | None, tried: set[int]
    ) -> tuple[Replica, int]:
        """The replica for a sequence, and the tokens that it is expected to need."""
        taking = {number: one for number, one in self._replicas.items() if one.takes_requests and number not in tried}
        if not taking:
            causes = [one.last_failure for one in self._replicas.values() if one.last_failure is not None]
            raise EngineDeadError(
                f"no {'other ' if tried else ''}replica takes requests{f'; {causes[-1]}' if causes else ''}",
                self._retry_after(),
            )
        answer = self._answer_tokens if params.max_tokens is None else min(params.max_tokens, self._answer_tokens)
        work = len(prompt) + round(answer)
        loads = {number: float(one.load) for number, one in taking.items()}
        return taking[self._router.choose(prompt, work, loads, cache_salt)], work

    @property
    def _any_takes_requests(self) -> bool:
        return any(replica.takes_requests for replica in self._replicas.values())

    def _retry_after(self) -> float:
        return min((one.retry_after for one in self._replicas.values() if one.state != "draining"), default=1.0)

    def stats(self) -> EngineStats:
        """Of all replicas together: sums of what they have, the mean of how full they are."""
        replicas = self.replicas
        alive = [stats for one in replicas if (stats := one.stats()).alive]
        up = [one.stats() for one in replicas if one.state == "up" and one.stats().alive]
        failures = [one.last_failure for one in replicas if one.last_failure is not None]
        return EngineStats(
            running=sum(stats.running for stats in alive),
            waiting=sum(stats.waiting for stats in alive),
            swapped=sum(stats.swapped for stats in alive),
            kv_cache_usage=sum(stats.kv_cache_usage for stats in alive) / max(1, len(alive)),
            last_step_age=min((stats.last_step_age for stats in alive), default=0.0),
            has_work=any(stats.has_work for stats in alive),
            unfinished=sum(one.unfinished for one in replicas),
            alive=bool(up),
            wedged=bool(up) and all(stats.wedged for stats in up),
            retry_after=None if up or self._stopping else self._retry_after(),
            restarts=self._removed_restarts + sum(one.restarts for one in replicas),
            last_failure=failures[-1] if failures else None,
        )

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        """Calls back after each step of any replica."""
        self._subscribers.append(on_step)

    def stop_restarting(self) -> None:
        """Lets the replicas run on, and replaces none: the server is about to end."""
        self._stopping = True
        for replica in self._replicas.values():
            replica.stop_restarting()

    async def close(self) -> None:
        """Ends all replicas; requests still open get an EngineDeadError."""
        self._stopping = True
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, *(replica.close() for replica in self.replicas), return_exceptions=True)
        self._replicas.clear()
        self._disconnect()

    # ---- more and fewer ----

    async def scale(self, count: int) -> None:
        """Goes towards so many replicas, and returns before they are there.

        New ones are placed; of those that there are, the ones that take no requests go first, then the latest. Each
        ends the requests that it has, and takes no more.

        Raises:
            ConfigError: there cannot be so many.
        """
        check_replicas(count, "replicas")
        await asyncio.to_thread(self._check_room, count)
        self.target = count
        staying = [replica for replica in self.replicas if replica.state != "draining"]
        for _ in range(count - len(staying)):
            self._add().start(patient=True)
        order = sorted(staying, key=lambda replica: (not replica.takes_requests, replica.number), reverse=True)
        for replica in order[: max(0, len(staying) - count)]:
            replica.retire()
            leaving = asyncio.create_task(self._leave(replica))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        logger.info("going from %d to %d replicas", len(staying), count)

    async def _leave(self, replica: Replica) -> None:
        await replica.drained()
        await replica.close()
        self._removed_restarts += replica.restarts
        self._router.forget(replica.number)
        del self._replicas[replica.number]
        logger.info("replica %d has ended its requests and is gone", replica.number)
