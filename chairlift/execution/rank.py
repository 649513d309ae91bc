"""The process of a rank other than 0: it follows the plans that come down its pipe.

Pipes carry the plans, and not the group that the ranks compute in: waiting for one takes no core, is the same for gloo
and NCCL, and ends when the engine does.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from chairlift.config import ConfigError
from chairlift.engine.lifeline import die_with
from chairlift.execution.collective import CommunicationError, DistributedRanks
from chairlift.execution.setup import Setup
from chairlift.execution.worker import Worker
from chairlift.model.source import ModelError
from chairlift.scheduling.plan import StepPlan

T = TypeVar("T")
STOP = None  # the last message


@dataclass(frozen=True, slots=True)
class Assignment:
    """The first message: which rank this is, and of what.

    Attributes:
        setup: what every rank has to know.
        rank: of this process.
        size: how many ranks there are.
        device: of this rank.
        num_threads: to compute with.
    """

    setup: Setup
    rank: int
    size: int
    device: torch.device
    num_threads: int


@dataclass(frozen=True, slots=True)
class Join:
    """All ranks are loaded and are to join one another; see :meth:`DistributedRanks.join`."""

    store: Path
    seconds: float


@dataclass(frozen=True, slots=True)
class Room:
    """KV blocks that fit: in an answer on this device, in a message those to make room for."""

    num_blocks: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """The start is over: from now on an operation that all ranks share may take so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank ends.

    Attributes:
        message: why, in one line.
        traceback: where.
        expected: the message alone tells the user what to change.
        others: it was another rank that did not take part.
    """

    message: str
    traceback: str = ""
    expected: bool = False
    others: bool = False


class _Inbox:
    """Messages of rank 0, read by a thread, so that its end is noticed in the middle of a step as well."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="chairlift-inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._queue.put(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(0)  # the engine is gone

    def next(self) -> Any:
        """Blocks until there is a message."""
        return self._queue.get()

    def expect(self, kind: type[T]) -> T:
        """Blocks until there is a message, which is of this kind."""
        message = self.next()
        if not isinstance(message, kind):
            raise TypeError(f"rank 0 was to send {kind.__name__}, not {type(message).__name__}")
        return message


def main(descriptor: int, parent_pid: int | None) -> None:
    """Serves rank 0 until it is told to stop, fails, or rank 0 is gone.

    Args:
        descriptor: of this rank's end of the pipe.
        parent_pid: for :func:`die_with`.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the engine decides what they mean
        signal.signal(ignored, signal.SIG_IGN)
    if parent_pid is not None:
        die_with(parent_pid)
    faulthandler.enable()
    pipe = Connection(descriptor)
    try:
        _serve(pipe)
    except CommunicationError as error:
        failure = Failure(str(error), others=True)
    except (ConfigError, ModelError, OSError) as error:  # written for the user
        failure = Failure(str(error), expected=True)
    except Exception as error:
        failure = Failure(" ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc())
    else:
        return
    pipe.send(failure)
    # Without the ceremony at the end of an interpreter, in which threads of a broken group may hang.
    os._exit(1)


def _serve(pipe: Connection) -> None:
    inbox = _Inbox(pipe)
    task = inbox.expect(Assignment)
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
    ranks = DistributedRanks(task.rank, task.size, task.device)
    worker = Worker(task.setup, ranks, task.device, task.num_threads)
    pipe.send(worker.holding)
    join = inbox.expect(Join)
    ranks.join(join.store, join.seconds)
    if task.setup.measures_memory:
        pipe.send(Room(worker.num_blocks_here()))
    room = inbox.expect(Room)
    worker.allocate(room.num_blocks, room.num_host_blocks)
    while (message := inbox.next()) is not STOP:
        if isinstance(message, StepPlan):
            worker.runner.follow(message)
        elif isinstance(message, Limit):
            ranks.limit(message.seconds)
    ranks.leave()
