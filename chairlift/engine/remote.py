"""A server's end of an engine that runs in its own process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import multiprocessing
import os
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.client import EngineDeadError, EngineStats
from chairlift.engine.core import AbortRequest, AddRequest, Command, StepOutput
from chairlift.engine.delta_stream import DeltaStream
from chairlift.engine.executor import Capacity
from chairlift.engine.lifeline import own_pid_for_children
from chairlift.engine.process import STOP, TELL_STACKS, Failed, Launch, Ready, run_engine
from chairlift.logs import LogConfig
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams

CLOSE_TIMEOUT = 10.0  # seconds that an engine has to end its step before it is killed


class RemoteEngine:
    """An :class:`AsyncEngineClient` whose engine is a child process.

    :meth:`launch` and :meth:`wait_until_loaded` can be called before there is an event loop; everything else
    belongs to one event loop. If the child dies, or this process does, the other one notices at once by the pipe.

    Args:
        config: of the engine.
        logs: how the child logs; ``None`` leaves that as it is.
        resumes: it takes the place of an engine that has ended.
    """

    def __init__(self, config: EngineConfig, logs: LogConfig | None = None, *, resumes: bool = False) -> None:
        self._config = config
        self._seeds = random.Random(config.seed)  # noqa: S311 - noise for sampling, not a secret
        self._ids = itertools.count()
        self._streams: dict[str, DeltaStream] = {}
        self._subscribers: list[Callable[[StepRecord], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None
        self._capacity: Capacity | None = None
        self._last = StepOutput()
        self._last_step = self._last_word = self._busy_since = time.monotonic()
        self._unanswered = False  # whether a command was sent since the engine's last word; it answers each
        context = multiprocessing.get_context("spawn")
        self._pipe, engine_end = context.Pipe()
        launch = Launch(
            logs=None if logs is None else replace(logs, process="engine"),
            killed_with=own_pid_for_children(),
            resumes=resumes,
        )
        self._process = context.Process(
            target=run_engine, args=(config, engine_end, launch), name="chairlift-engine", daemon=True
        )
        self._threads = [
            threading.Thread(target=self._read, name="chairlift-outputs", daemon=True),
            threading.Thread(target=self._write, name="chairlift-commands", daemon=True),
        ]
        self._engine_end = engine_end
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def launch(self) -> None:
        """Starts the process, which begins to load the model."""
        self._process.start()
        # However this process ends in good order, the engine does too; it takes no SIGTERM, which is what
        # multiprocessing's own hook would send it.
        atexit.register(self._process.kill)
        self._engine_end.close()  # the child has its own copy; with this one open its end would never be seen

    def wait_until_loaded(self) -> None:
        """Blocks until the engine takes requests. :meth:`kill` ends the wait.

        Raises:
            ConfigError: the settings or the model cannot work; the message says what to change.
            EngineDeadError: the engine ended otherwise while loading. Nothing of it is left in either case.
        """
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            message = Failed(f"the engine process ended while loading ({self._exit_status()})")
        if isinstance(message, Failed):
            self._end_process()
            raise ConfigError(message.message) if message.expected else EngineDeadError(message.message)
        assert isinstance(message, Ready)  # noqa: S101
        self._capacity = message.capacity
        self._last_step = self._last_word = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def capacity(self) -> Capacity:
        """What fits, and what is loaded."""
        if self._capacity is None:
            raise EngineDeadError("the engine is not loaded")
        return self._capacity

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid

    @property
    def death(self) -> str | None:
        """Why the engine ended; ``None`` while it has not."""
        return self._death

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        """Runs one sequence; see :class:`AsyncEngineClient`."""
        self._loop = asyncio.get_running_loop()
        if self._death is not None:
            raise EngineDeadError(self._death)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        request_id = str(next(self._ids))
        if not self._streams and not self._unanswered:
            self._busy_since = time.monotonic()
        stream = self._streams[request_id] = DeltaStream()
        finished = False
        try:
            self._send(AddRequest(request_id, prompt_token_ids, params, time.monotonic(), priority, cache_salt))
            while not finished:
                delta = await stream.next()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request_id]
            if not finished and self._death is None:
                self._send(AbortRequest(request_id))

    def _send(self, command: Command) -> None:
        self._unanswered = True
        self._outbox.put(command)

    def stats(self) -> EngineStats:
        """Returns the state as last heard. Never blocks."""
        now = time.monotonic()
        last = self._last
        has_work = bool(self._streams)
        # An engine may wait for a batch to fill, and says until when, by a clock that both processes read.
        stalled = now - max(self._last_word, self._busy_since, last.wait_until or 0.0)
        return EngineStats(
            running=last.running,
            waiting=last.waiting,
            swapped=last.swapped,
            kv_cache_usage=last.blocks_used / self.capacity.num_blocks,
            last_step_age=now - self._last_step,
            has_work=has_work,
            unfinished=len(self._streams),
            alive=self._death is None,
            # Clients that leave must not make one that hangs seem idle.
            wedged=(has_work or self._unanswered) and stalled > self._config.step_timeout,
        )

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        """Calls back after each step, on the event loop, with its record."""
        self._subscribers.append(on_step)

    def excuse(self) -> None:
        """Starts the clock of ``step_timeout`` anew: the engine may have been stopped together with this process."""
        self._busy_since = time.monotonic()

    def tell_stacks(self) -> None:
        """Has the engine write to its error output what its threads are doing, if it still runs at all."""
        if TELL_STACKS is not None and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, TELL_STACKS)

    def kill(self, cause: str) -> None:
        """Ends the engine whatever it is doing; requests still open get an :class:`EngineDeadError` with ``cause``."""
        self._die(cause)
        self._process.kill()

    async def close(self) -> None:
        """Ends the engine; requests still open get an :class:`EngineDeadError`."""
        self._die("the engine is shut down")
        self._outbox.put(STOP)
        await asyncio.get_running_loop().run_in_executor(None, self._end_process)

    def _end_process(self) -> None:
        """Waits for the process, kills it if that takes too long, and frees all that belongs to it."""
        self._process.join(CLOSE_TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_TIMEOUT)  # both end with the process
        self._pipe.close()

    def _write(self) -> None:
        """Sends commands, in a thread: an engine that hangs stops taking them, and must not stop the event loop too."""
        command: Command | None
        with contextlib.suppress(OSError):  # the engine is gone, as the reader learns too
            while (command := self._outbox.get()) is not STOP:
                self._pipe.send(command)
            self._pipe.send(STOP)

    def _exit_status(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"

    # ---- from the engine; the reader thread only passes on ----

    def _read(self) -> None:
        while True:
            try:
                message: Any = self._pipe.recv()
            except (EOFError, OSError):
                message = Failed(f"the engine process ended ({self._exit_status()})")
            try:
                loop = self._loop
                if loop is None:
                    self._receive(message)
                else:
                    loop.call_soon_threadsafe(self._receive, message)
            except RuntimeError:
                return  # the event loop is closed: nobody is left to tell
            if isinstance(message, Failed):
                return

    def _receive(self, message: StepOutput | Failed) -> None:
        if isinstance(message, Failed):
            self._die(message.message)
            return
        self._last = message
        self._last_word = time.monotonic()
        self._unanswered = False
        for delta in message.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:  # else its reader has gone
                stream.push(delta)
        if message.record is not None:
            self._last_step = self._last_word
            for on_step in self._subscribers:
                on_step(message.record)

    def _die(self, cause: str) -> None:
        if self._death is None:
            self._death = cause
            for stream in self._streams.values():
                stream.fail(EngineDeadError(cause))
