"""The actor of one replica: holds an engine, runs what it is sent, and tells what came of it.

It is an asynchronous actor of Ray's, whose methods are called by one server, and knows nothing of Ray itself. The
engine is a process of its own, as under a server without a cluster, and is replaced here when it dies; the server
replaces the actor when that dies, or its node.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

from chairlift import logs
from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.client import EngineDeadError
from chairlift.engine.process import Failed
from chairlift.engine.supervisor import SupervisedEngine
from chairlift.scheduling.plan import SequenceDelta, StepRecord

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""A replica without news says so this often."""


class EngineHost:
    """One replica's engine and the sequences that run on it.

    Args:
        number: of the replica.
        config: of the engine.
        num_threads: compute threads of the engine; ``None`` leaves that to it.
        log_config: how this process and the engine log.
    """

    def __init__(
        self, number: int, config: EngineConfig, num_threads: int | None, log_config: logs.LogConfig | None
    ) -> None:
        self._number = number
        self._config = config
        self._num_threads = num_threads
        self._logs = log_config and replace(log_config, process=f"replica-{number}")
        self._engine: SupervisedEngine | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._deltas: dict[str, SequenceDelta] = {}
        self._broken: dict[str, str] = {}
        self._records: list[StepRecord] = []
        self._news = asyncio.Event()

    async def start(self) -> Loaded | Failed:
        """Loads the engine, and returns when it takes requests, or why it cannot."""
        if self._logs is not None:
            logs.configure(self._logs)
        try:
            # The limit of threads is held against the cores of this machine, not against those of the server's.
            config = replace(
                self._config, num_threads=self._num_threads, step_log=_own_file(self._config.step_log, self._number)
            )
            engine = await asyncio.to_thread(SupervisedEngine.start, config, self._logs)
        except ConfigError as error:
            return Failed(str(error), expected=True)
        except (EngineDeadError, OSError) as error:
            return Failed(str(error))
        engine.subscribe(self._on_step)
        engine.watch()
        self._engine = engine
        return Loaded(engine.capacity, socket.gethostname())

    async def submit(self, commands: Sequence[Begin | Abort]) -> None:
        """Takes commands, in order."""
        engine = self._loaded()
        for command in commands:
            if isinstance(command, Begin):
                self._running[command.request_id] = asyncio.create_task(self._run(engine, command))
            elif (task := self._running.get(command.request_id)) is not None:
                task.cancel()

    async def poll(self) -> News:
        """Returns what came since the last call, as soon as there is anything; one caller at a time.

        All that one step of the engine brings is one answer: the readers of its sequences run before whoever they wake.
        """
        engine = self._loaded()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), HEARTBEAT_SECONDS)
        self._news.clear()
        news = News(engine.stats(), engine.capacity, self._deltas, self._broken, self._records)
        self._deltas, self._broken, self._records = {}, {}, []
        return news

    async def close(self) -> None:
        """Ends the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def _loaded(self) -> SupervisedEngine:
        if self._engine is None:
            raise EngineDeadError("the replica is not loaded")
        return self._engine

    async def _run(self, engine: SupervisedEngine, command: Begin) -> None:
        request_id = command.request_id
        try:
            stream = engine.generate(
                command.prompt_token_ids, command.params, priority=command.priority, cache_salt=command.cache_salt
            )
            async with aclosing(stream):  # type: ignore[type-var] # the engine's streams are generators
                async for delta in stream:
                    earlier = self._deltas.get(request_id)
                    self._deltas[request_id] = delta if earlier is None else delta.after(earlier)
                    self._news.set()
        except EngineDeadError as error:
            self._broken[request_id] = str(error)
        except Exception as error:
            logger.exception("a sequence failed")
            self._broken[request_id] = f"{type(error).__name__}: {error}"
        finally:
            del self._running[request_id]
            self._news.set()

    def _on_step(self, record: StepRecord) -> None:
        self._records.append(record)
        self._news.set()


def _own_file(path: str | None, number: int) -> str | None:
    """``steps.jsonl`` of replica 2 is ``steps.2.jsonl``."""
    return None if path is None else str(Path(path).with_suffix(f".{number}{Path(path).suffix}"))
