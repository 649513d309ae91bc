"""A server's end of one replica: its place, its actor, and the sequences that run there.

A replica that is lost is placed anew, by a placement group and an actor of its own. Ray would restart the actor itself
(``max_restarts``), but only once it has given the node up for dead, which takes it some ten seconds longer than the
broken connection takes to be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import ConfigError
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.delta_stream import DeltaStream
from chairlift.engine.executor import Capacity
from chairlift.engine.process import Failed
from chairlift.engine.supervisor import Backoff
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A replica that says nothing for so long is given up, whatever Ray thinks of it: it has a word to say each second."""
CLOSE_SECONDS = 12.0
"""Time for an engine to end its step and its process; then its actor is killed."""

DRAIN_POLL_SECONDS = 0.05
MAX_CAUSE = 300  # characters of an error

T = TypeVar("T")


class LostError(RuntimeError):
    """The replica has ended. The message is the cause."""


class Actor(Protocol):
    """A placed :class:`~chairlift.cluster.host.EngineHost`. Whatever it raises means that it is lost."""

    async def placed(self) -> None:
        """Waits until there is room for it, however long that takes."""
        ...

    def start(self) -> Awaitable[Loaded | Failed]:
        """See :class:`~chairlift.cluster.host.EngineHost`."""
        ...

    def submit(self, commands: Sequence[Begin | Abort]) -> Awaitable[None]:
        """See :class:`~chairlift.cluster.host.EngineHost`."""
        ...

    def poll(self) -> Awaitable[News]:
        """See :class:`~chairlift.cluster.host.EngineHost`."""
        ...

    def close(self) -> Awaitable[None]:
        """See :class:`~chairlift.cluster.host.EngineHost`."""
        ...

    async def remove(self) -> None:
        """Kills the actor and gives its place back. Raises nothing."""
        ...


class Replica:
    """One replica over all its lives.

    Attributes:
        number: of the replica, never used twice.
        state: "placing" while it has no place, or was lost; "loading"; "up"; "draining" when it takes no more requests
            and is about to go.
        node: where it is, or was last.
        capacity: what fits, once that is known.
        load: tokens that its unfinished requests may still need.
        requests: how many sequences it was sent.
        lost: how often it was placed again.
        sums: over its steps; see :class:`StepSums`.
        last_failure: why it was lost last.
    """

    def __init__(
        self,
        number: int,
        place: Callable[[int], Actor],
        on_step: Callable[[StepRecord], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.number = number
        self.state = "placing"
        self.node = ""
        self.capacity: Capacity | None = None
        self.load = 0
        self.requests = 0
        self.lost = 0
        self.last_failure: str | None = None
        self.sums = StepSums()
        self._place = place
        self._on_step = on_step
        self._on_lost = on_lost
        self._stats = EngineStats(alive=False)
        self._engine_restarts = 0
        self._streams: dict[str, DeltaStream] = {}
        self._ids = itertools.count()
        self._outbox: list[Begin | Abort] = []
        self._wanted = asyncio.Event()
        self._expected = 0.0
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeping: asyncio.Task[None] | None = None
        self._again = True
        self._patient = False

    # ---- for whoever routes ----

    @property
    def takes_requests(self) -> bool:
        """Whether one that comes now would be run."""
        return self.state == "up" and self._stats.alive and not self._stats.wedged

    @property
    def unfinished(self) -> int:
        """Sequences that it has not ended."""
        return len(self._streams)

    @property
    def restarts(self) -> int:
        """How often it was replaced as a whole, and its engine alone."""
        return self.lost + self._engine_restarts + self._stats.restarts

    @property
    def retry_after(self) -> float:
        """Seconds until it may take requests again, while it takes none."""
        return max(1.0, self._expected - time.monotonic(), self._stats.retry_after or 0.0)

    def stats(self) -> EngineStats:
        """The state of its engine, as last heard."""
        return self._stats

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int, cache_salt: str | None
    ) -> AsyncGenerator[SequenceDelta, None]:
        """Runs one sequence; see :class:`~chairlift.engine.client.AsyncEngineClient`. Its seed has to be given."""
        if self.state != "up":
            raise EngineDeadError(f"replica {self.number} is not there", self.retry_after)
        request_id = str(next(self._ids))
        stream = self._streams[request_id] = DeltaStream()
        self.requests += 1
        ended = False
        try:
            self._send(Begin(request_id, prompt_token_ids, params, priority, cache_salt))
            while not ended:
                delta = await stream.next()
                ended = delta.finish_reason is not None
                yield delta
        except EngineDeadError:
            ended = True
            raise
        finally:
            # Of a life that is over nothing is left to abort.
            if self._streams.pop(request_id, None) is not None and not ended:
                self._send(Abort(request_id))

    def _send(self, command: Begin | Abort) -> None:
        self._outbox.append(command)
        self._wanted.set()

    # ---- its lives ----

    def start(self, *, patient: bool = False) -> asyncio.Future[None]:
        """Begins to keep it running; what is returned is done when it first takes requests.

        That fails with a ConfigError, or an EngineDeadError, where the first attempt does; then it is not tried again,
        unless it is to be ``patient``.
        """
        self._patient = patient
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(_log_bug)
        return self._started

    def stop_restarting(self) -> None:
        """Lets it run on, and places no other when it is lost."""
        self._again = False

    def retire(self) -> None:
        """Takes no more requests, and is not placed again."""
        self.state = "draining"
        self._again = False

    async def drained(self) -> None:
        """Returns when the requests that it has have ended."""
        while self._streams:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Ends it; requests still open get an EngineDeadError."""
        self._again = False
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    async def _keep(self) -> None:
        """Places it again and again, ever more rarely while that fails."""
        backoff = Backoff()
        while True:
            begun = time.monotonic()
            up = False
            actor: Actor | None = None
            try:
                actor = self._place(self.number)
                await actor.placed()
                self._is("loading")
                loaded = await actor.start()
                if isinstance(loaded, Failed):
                    raise ConfigError(loaded.message) if loaded.expected else LostError(loaded.message)
                begun, load_seconds, up = time.monotonic(), time.monotonic() - begun, True
                self._come_up(loaded)
                await self._live(actor)
            except asyncio.CancelledError:
                self._go_down("the server is shut down")
                if actor is not None and up:
                    await _close(actor)
                raise
            except Exception as error:  # Ray has many; all of them mean the same here
                self._go_down(_one_line(error))
                if not self._started.done() and not self._patient:
                    self._started.set_exception(_told(error))
                    self._started.exception()  # seen, even if nobody waits any more
                    self._again = False
            finally:
                if actor is not None:
                    await actor.remove()
            if not self._again:
                return
            delay = backoff.next_delay(time.monotonic() - begun if up else 0.0)
            self._expected = time.monotonic() + delay + (load_seconds if up else 0.0)
            logger.warning("replica %d is placed anew in %.1f s (attempt %d)", self.number, delay, backoff.failures)
            await asyncio.sleep(delay)

    def _is(self, state: str) -> None:
        if self.state != "draining":
            self.state = state

    def _come_up(self, loaded: Loaded) -> None:
        self.capacity, self.node = loaded.capacity, loaded.node
        self._stats = EngineStats()
        self._is("up")
        if self._started.done():
            self.lost += 1
            logger.info("replica %d is there again, on %s", self.number, self.node)
        else:
            self._started.set_result(None)
            logger.info("replica %d takes requests, on %s", self.number, self.node)

    def _go_down(self, cause: str) -> None:
        self._is("placing")
        self._engine_restarts += self._stats.restarts
        self._stats = EngineStats(alive=False)
        self.last_failure = cause
        self._outbox.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(f"replica {self.number} was lost: {cause}"))
        self._on_lost(self.number)
        if self._again:
            logger.error("replica %d failed: %s", self.number, cause)

    async def _live(self, actor: Actor) -> None:
        """Talks to it until it is lost, which raises."""
        talking = [asyncio.ensure_future(self._tell(actor)), asyncio.ensure_future(self._hear(actor))]
        try:
            await asyncio.wait(talking, return_when=asyncio.FIRST_EXCEPTION)
            for task in talking:
                if task.done():
                    task.result()
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)

    async def _tell(self, actor: Actor) -> None:
        """Sends commands. One call at a time: what comes meanwhile goes with the next, and order is kept."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            commands, self._outbox = self._outbox, []
            if commands:
                await _within(SILENT_SECONDS, actor.submit(commands))

    async def _hear(self, actor: Actor) -> None:
        while True:
            self._receive(await _within(SILENT_SECONDS, actor.poll()))

    def _receive(self, news: News) -> None:
        if news.stats.restarts != self._stats.restarts:
            self._on_lost(self.number)  # another engine, whose cache is empty
        self._stats, self.capacity = news.stats, news.capacity
        for request_id, delta in news.deltas.items():
            if (stream := self._streams.get(request_id)) is not None:  # else its reader has gone
                stream.push(delta)
        for request_id, cause in news.broken.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.fail(EngineDeadError(f"the engine of replica {self.number} failed: {cause}"))
                self.last_failure = cause
        for record in news.records:
            self.sums.add(record)
            self._on_step(record)


class StepSums:
    """What the steps of a replica add up to, over all its lives.

    Attributes:
        steps: how many.
        seconds: spent in them.
        rows: token rows computed.
        looked_up, cached: prompt tokens looked up in its prefix cache, and found there.
        preempted: sequences put aside.
    """

    def __init__(self) -> None:
        self.steps = self.rows = self.looked_up = self.cached = self.preempted = 0
        self.seconds = 0.0

    def add(self, record: StepRecord) -> None:
        """Adds a step."""
        self.steps += 1
        self.seconds += record.elapsed
        self.rows += record.rows.total
        self.looked_up += record.looked_up_tokens
        self.cached += record.cached_tokens
        self.preempted += record.preempted


async def _within(seconds: float, call: Awaitable[T]) -> T:
    """Waits for an answer, but not for ever."""
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        raise LostError(f"it did not answer within {seconds:g} seconds") from None


async def _close(actor: Actor) -> None:
    with contextlib.suppress(Exception):  # it is killed next in any case
        await asyncio.wait_for(actor.close(), CLOSE_SECONDS)


def _told(error: Exception) -> Exception:
    return error if isinstance(error, ConfigError) else EngineDeadError(_one_line(error))


def _one_line(error: Exception) -> str:
    """The first words: Ray's errors go on for pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_CAUSE else f"{text[:MAX_CAUSE]}…"


def _log_bug(keeping: asyncio.Task[None]) -> None:
    if not keeping.cancelled() and (bug := keeping.exception()) is not None:
        logger.critical("nobody looks after a replica any more", exc_info=bug)
