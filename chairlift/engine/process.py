"""The engine's own process: so that HTTP, JSON and detokenization never take time from a step.

It shares one pipe with its server. Commands come in, a :class:`StepOutput` goes out after each turn of the loop, all
pickled. A thread reads the pipe, so that a command never waits for a step to be taken off it; the main thread owns the
scheduler and runs the loop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from chairlift import logs
from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.build import build_core
from chairlift.engine.core import Command, EngineCore
from chairlift.engine.executor import Capacity
from chairlift.engine.lifeline import die_with
from chairlift.garbage import keep_collections_short, put_off_collections
from chairlift.model.source import ModelError

logger = logging.getLogger(__name__)

STOP = None  # the last command
TELL_STACKS = getattr(signal, "SIGUSR1", None)
"""Signal upon which an engine writes what its threads are doing, even in the middle of a kernel."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded and takes requests."""

    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine ends. ``expected`` says that the message alone tells the user what to change."""

    message: str
    expected: bool = False


class _Inbox:
    """Commands that have come in, in order, and the news that the executor has failed while nothing was executed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Command | Exception | None] = queue.SimpleQueue()
        self._waited_for: list[Command] = []
        self.stopped = False
        threading.Thread(target=self._read, name="chairlift-inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._queue.put(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(0)  # the server is gone: a step in progress would be for nobody

    def fail(self, error: Exception) -> None:
        """Has the loop end with this error, when it next looks here. Any thread may call this."""
        self._queue.put(error)

    def wait(self, seconds: float | None = None) -> None:
        """Blocks until there is a command, or for so many seconds."""
        with contextlib.suppress(queue.Empty):
            self._take(self._queue.get(timeout=seconds), self._waited_for)

    def drain(self) -> list[Command]:
        """Returns what has come in, without waiting."""
        commands, self._waited_for = self._waited_for, []
        while not self._queue.empty():
            self._take(self._queue.get(), commands)
        return commands

    def _take(self, command: Command | Exception | None, commands: list[Command]) -> None:
        if isinstance(command, Exception):
            raise command
        if command is STOP:
            self.stopped = True
        else:
            commands.append(command)


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine process is started with, beside its settings.

    Attributes:
        logs: how it logs; ``None`` leaves that as it is.
        killed_with: process id of the server whose death kills the engine, whatever it is doing; ``None`` where it is
            to notice by the pipe alone.
        resumes: it takes the place of one that ended, and continues its step log.
    """

    logs: logs.LogConfig | None = None
    killed_with: int | None = None
    resumes: bool = False


def run_engine(config: EngineConfig, pipe: Connection, launch: Launch) -> None:
    """Loads the model, then steps until it is told to stop or its server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides what it means
    if launch.killed_with is not None:
        die_with(launch.killed_with)
    if launch.logs is not None:
        logs.configure(launch.logs)
    faulthandler.enable()
    if TELL_STACKS is not None:
        faulthandler.register(TELL_STACKS)
    inbox = _Inbox(pipe)
    put_off_collections()
    try:
        core = build_core(config, inbox.drain, resumes=launch.resumes, on_failure=inbox.fail)
    except (ConfigError, ModelError, OSError) as error:  # written for the user
        pipe.send(Failed(str(error), expected=True))
        return
    except Exception as error:
        pipe.send(_failure(error))
        return
    # A supervisor that ends the whole group means the server, which lets open answers end and then ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(Ready(core.executor.capacity()))
    keep_collections_short()  # a tenth of a second, while the server makes ready
    try:
        _loop(core, inbox, pipe)
    except Exception as error:
        pipe.send(_failure(error))
    finally:
        core.close()


def _failure(error: Exception) -> Failed:
    """An end that nobody foresaw, in one line, which clients get to see; the log has where it happened."""
    logger.error("the engine cannot go on", exc_info=error)
    return Failed(" ".join(f"{type(error).__name__}: {error}".split()))


def _loop(core: EngineCore, inbox: _Inbox, pipe: Connection) -> None:
    while not inbox.stopped:
        if not core.has_work:
            inbox.wait()
        output = core.step()
        pipe.send(output)
        if output.wait_until is not None:
            inbox.wait(max(0.0, output.wait_until - core.clock.now()))
