"""Keeps an engine running: one that dies or hangs is replaced by another, of the same settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.remote import RemoteEngine
from chairlift.logs import LogConfig
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
FROZEN_SECONDS = 2.0
"""Where two looks at the engine lie further apart than this, the server itself was stopped, and likely both were."""
STACKS_SECONDS = 0.2
"""Time for a wedged engine to write what it is doing."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0
"""Seconds before an engine is replaced: these, then twice as many after each failure, up to so many."""
STABLE_SECONDS = 60.0
"""An engine that ran for so long has done well: the next failure counts as the first."""


class Backoff:
    """How long to wait before the next attempt, the longer the more of them have failed."""

    def __init__(self) -> None:
        self.failures = 0

    def next_delay(self, ran: float) -> float:
        """Returns the seconds to wait, after an engine that ran for ``ran`` seconds has failed."""
        if ran >= STABLE_SECONDS:
            self.failures = 0
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0**self.failures)
        self.failures += 1
        return delay


class SupervisedEngine:
    """An :class:`~chairlift.engine.client.AsyncEngineClient` that outlives the engines behind it.

    :meth:`launch` starts the first engine and :meth:`begin` waits until it is loaded, or :meth:`start` does both; then
    it is looked after. While there is none, requests fail with an :class:`EngineDeadError` that says when to come back.
    """

    def __init__(self, config: EngineConfig, logs: LogConfig | None, engine: RemoteEngine) -> None:
        self._config = config
        self._logs = logs
        self._engine: RemoteEngine | None = engine
        self._capacity: Capacity | None = None
        self._launched = time.monotonic()
        self._load_seconds = 0.0
        self._expected = 0.0  # when there may be an engine again, while there is none
        self._restarts = 0
        self._last_failure: str | None = None
        self._stopping = False
        self._subscribers: list[Callable[[StepRecord], None]] = []
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def launch(cls, config: EngineConfig, logs: LogConfig | None = None) -> SupervisedEngine:
        """Starts the first engine, which loads while the caller goes on. The thread that calls has to outlive it."""
        engine = RemoteEngine(config, logs)
        engine.launch()
        return cls(config, logs, engine)

    @classmethod
    def start(cls, config: EngineConfig, logs: LogConfig | None = None) -> SupervisedEngine:
        """Starts the first engine and blocks until it is ready; :meth:`watch` begins to look after it.

        Raises:
            ConfigError, EngineDeadError: as :meth:`begin`.
        """
        supervised = cls.launch(config, logs)
        assert supervised._engine is not None  # noqa: S101
        supervised._engine.wait_until_loaded()
        supervised._note_loaded(supervised._engine)
        return supervised

    async def begin(self) -> None:
        """Waits until the first engine is ready, and begins to look after it. This one is not tried again: a user is
        there to see it. Cancelled, or where it fails, nothing of the engine is left.

        Raises:
            ConfigError: the settings or the model cannot work; the message says what to change.
            EngineDeadError: the engine ended otherwise while loading.
        """
        engine, self._engine = self._engine, None
        assert engine is not None  # noqa: S101 - there is one until it has ended
        await _load(engine)
        self._engine = engine
        self._note_loaded(engine)
        self.watch()

    def _note_loaded(self, engine: RemoteEngine) -> None:
        self._capacity = engine.capacity
        self._load_seconds = time.monotonic() - self._launched

    def watch(self) -> None:
        """Begins to look after the engine, on the running event loop."""
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(_log_bug)

    @property
    def capacity(self) -> Capacity:
        """What fits: into the engine that runs, or ran last."""
        if self._capacity is None:
            raise EngineDeadError("the engine is not loaded")
        return self._capacity

    @property
    def pid(self) -> int | None:
        """The process id of the engine, while there is one."""
        return None if self._engine is None else self._engine.pid

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        """Runs one sequence; see :class:`~chairlift.engine.client.AsyncEngineClient`.

        Raises:
            EngineDeadError: there is no engine at this moment.
        """
        if (engine := self._living) is None:
            raise EngineDeadError(f"{self._why}; another engine is being started", self._retry_after())
        return engine.generate(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)

    def stats(self) -> EngineStats:
        """Returns the state as last heard. Never blocks."""
        stats = EngineStats(alive=False) if (engine := self._living) is None else engine.stats()
        return replace(
            stats,
            retry_after=None if stats.alive or self._stopping else self._retry_after(),
            restarts=self._restarts,
            last_failure=self._why,
        )

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        """Calls back after each step of this engine and of those that will take its place."""
        self._subscribers.append(on_step)
        if self._engine is not None:
            self._engine.subscribe(on_step)

    def stop_restarting(self) -> None:
        """Lets the engine run on, and starts no other: the server is about to end."""
        self._stopping = True
        if self._engine is None and self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        """Ends the engine; requests still open get an :class:`EngineDeadError`."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._engine is not None:
            if self._capacity is None:
                self._engine.kill("the server is shutting down")  # one that loads listens to nobody
            await self._engine.close()

    @property
    def _living(self) -> RemoteEngine | None:
        """The engine, unless it has died, which :meth:`_watch` may not have seen yet."""
        return None if self._engine is None or self._engine.death is not None else self._engine

    @property
    def _why(self) -> str | None:
        """Why the last engine that died did."""
        return self._last_failure if self._engine is None else self._engine.death or self._last_failure

    def _retry_after(self) -> float:
        return max(1.0, self._expected - time.monotonic())

    async def _watch(self) -> None:
        """Replaces engines, until it is cancelled or told to stop."""
        backoff = Backoff()
        engine = self._engine
        while engine is not None:
            begun = time.monotonic()
            cause = await _end_of(engine)
            ran = time.monotonic() - begun
            logger.error("the engine failed after %.1f s: %s", ran, cause)
            self._last_failure, self._engine = cause, None
            await engine.close()  # before another one is started: its memory has to be free
            engine = None if self._stopping else await self._replacement(backoff, ran)
            if engine is not None:
                self._put_in_place(engine)

    async def _replacement(self, backoff: Backoff, ran: float) -> RemoteEngine:
        """Tries until there is an engine, ever more rarely."""
        while True:
            delay = backoff.next_delay(ran)
            self._expected = time.monotonic() + delay + self._load_seconds
            logger.warning("starting another engine in %.1f s (attempt %d)", delay, backoff.failures)
            await asyncio.sleep(delay)
            begun = time.monotonic()
            # On this thread and not in _load: the system kills an engine together with the thread that started it.
            try:
                engine = RemoteEngine(self._config, self._logs, resumes=True)
                engine.launch()
                await _load(engine)
            except (ConfigError, EngineDeadError, OSError) as error:
                ran = 0.0
                self._last_failure = str(error)
                logger.error("the engine could not be started: %s", error)
            else:
                self._load_seconds = time.monotonic() - begun
                return engine

    def _put_in_place(self, engine: RemoteEngine) -> None:
        self._restarts += 1
        self._capacity = engine.capacity
        for on_step in self._subscribers:
            engine.subscribe(on_step)
        self._engine = engine
        logger.info("there is an engine again, loaded in %.1f s: %s", self._load_seconds, _describe(engine.capacity))


async def _end_of(engine: RemoteEngine) -> str:
    """Waits until the engine is dead, by itself or killed because no step of it ends; returns the cause."""
    looked = time.monotonic()
    while engine.death is None:
        await asyncio.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - looked > FROZEN_SECONDS:
            engine.excuse()
        looked = now
        if engine.stats().wedged:
            engine.tell_stacks()
            await asyncio.sleep(STACKS_SECONDS)
            engine.kill("no step of the engine ended within --step-timeout")
    return engine.death


async def _load(engine: RemoteEngine) -> None:
    """Waits for the engine without blocking the event loop; cancelled, it leaves nothing of the engine behind."""
    loading = asyncio.ensure_future(asyncio.to_thread(engine.wait_until_loaded))
    try:
        await asyncio.shield(loading)
    except asyncio.CancelledError:
        engine.kill("the server is shutting down")
        with contextlib.suppress(ConfigError, EngineDeadError):
            await loading
            await engine.close()  # it had just become ready
        raise


def _log_bug(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and (bug := watching.exception()) is not None:
        logger.critical("nobody looks after the engine any more", exc_info=bug)


def _describe(capacity: Capacity) -> str:
    return f"{capacity.num_blocks:,} KV blocks of {capacity.block_size} tokens"
