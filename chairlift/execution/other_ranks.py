"""The processes of the ranks other than 0, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from chairlift.config import ConfigError
from chairlift.engine.lifeline import own_pid_for_children
from chairlift.execution.collective import CommunicationError
from chairlift.execution.rank import STOP, Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""Time for ranks to say what they know, once something has gone wrong."""
CLOSE_SECONDS = 3.0
"""Time for ranks to end by themselves."""
COMMAND = "from chairlift.execution.rank import main; main({descriptor}, {parent_pid})"


class RankError(RuntimeError):
    """A rank has ended or does not answer, and with it the engine. The message says which and why."""


@dataclass(slots=True)
class _Rank:
    """One of them: its process, this end of its pipe, and what it has answered."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    answers: deque[Any] = field(default_factory=deque)


class OtherRanks:
    """Starts the processes of ranks 1 and on, talks to them, and finds out which one is to blame.

    They are plain child processes, as an engine's own process may have no children by multiprocessing. Each ends when
    this process does, by the end of its pipe and on Linux by the system.

    Args:
        size: how many ranks there are, this process as rank 0 among them.
        patience: seconds for which a message may wait for a rank that does not read.
        on_failure: called once, by a thread, when one of them has ended, while a step runs or not.
    """

    def __init__(self, size: int, patience: float, on_failure: Callable[[RankError], None] | None = None) -> None:
        self._size = size
        self._on_failure = on_failure
        self._ends: dict[int, Failure] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._ranks: list[_Rank] = []
        self._watcher = threading.Thread(target=self._watch, name="chairlift-ranks", daemon=True)
        try:
            for number in range(1, size):
                self._ranks.append(_start(number, patience))
        except OSError:
            self.close(at_once=True)
            raise
        self._watcher.start()

    def assign(self, messages: Sequence[object]) -> None:
        """Sends each rank a message of its own."""
        for rank, message in zip(self._ranks, messages, strict=True):
            _send(rank, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send(self, message: object) -> None:
        """Sends all ranks the same.

        Raises:
            CommunicationError: one of them does not take it.
        """
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks:
            _send(rank, content)

    def answers(self, kind: type[T]) -> list[T]:
        """Waits for an answer of each rank, in their order.

        Raises:
            RankError: one of them has ended.
            ConfigError: one of them could not begin, and says what to change.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ends or all(rank.answers for rank in self._ranks))
            if self._ends:
                if (cause := self._cause()) is not None and cause[1].expected:
                    raise ConfigError(cause[1].message)
                raise self.failure("a rank has ended")
            found = [rank.answers.popleft() for rank in self._ranks]
        if not all(isinstance(answer, kind) for answer in found):
            raise TypeError(f"ranks were to answer with {kind.__name__}, not {found}")
        return found

    def failure(self, noticed: str) -> RankError:
        """Why the ranks cannot go on, once they have had time to say so; ``noticed`` is what rank 0 saw of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause() or len(self._ends) == len(self._ranks), GRACE_SECONDS)
            cause = self._cause()
            silent = [rank.number for rank in self._ranks if rank.number not in self._ends]
        if cause is not None:
            return self._error(*cause)
        if silent:
            return RankError(f"{self._named(silent)} no answer: it hangs, or is far behind the others ({noticed})")
        return RankError(f"the ranks have lost one another ({noticed})")

    def close(self, *, at_once: bool = False) -> None:
        """Ends all ranks, those that do not end in time by force. Safe to call twice."""
        self._closing = True
        deadline = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(CommunicationError):
                _send(rank, pickle.dumps(STOP))
        for rank in self._ranks:
            # Once one is gone the others may hang in what they do together.
            patience = 0.0 if at_once or self._ends else max(0.0, deadline - time.monotonic())
            try:
                rank.process.wait(patience)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._watcher.is_alive():
            self._watcher.join()
        for rank in self._ranks:
            rank.pipe.close()
        self._ranks = []

    # ---- the watching thread ----

    def _watch(self) -> None:
        """Takes answers, and notices ends."""
        ranks = {rank.pipe: rank for rank in self._ranks}
        while ranks:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)  # noqa: S101 - it waits for nothing else
                rank = ranks[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    del ranks[pipe]
                    message = Failure(_end_of(rank.process))
                self._take(rank, message)

    def _take(self, rank: _Rank, message: Any) -> None:
        with self._changed:
            if not isinstance(message, Failure):
                rank.answers.append(message)
            elif self._closing or rank.number in self._ends:
                return
            else:
                first = self._cause() is None
                self._ends[rank.number] = message
            self._changed.notify_all()
        if isinstance(message, Failure) and not message.others and first:
            error = self._error(rank.number, message)
            if not message.expected:
                logger.error("%s%s", error, f"\n{message.traceback}" if message.traceback else "")
            if self._on_failure is not None:
                self._on_failure(error)

    def _cause(self) -> tuple[int, Failure] | None:
        """The end that is to blame, if one is: those whose rank only missed another one are not."""
        return next(((number, end) for number, end in self._ends.items() if not end.others), None)

    def _error(self, number: int, failure: Failure) -> RankError:
        return RankError(f"rank {number} of {self._size} ended: {failure.message}")

    def _named(self, numbers: Sequence[int]) -> str:
        ranks = f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))
        return f"{ranks} of {self._size} gave"


def _start(number: int, patience: float) -> _Rank:
    here, there = socket.socketpair()
    # Writing to one that no longer reads must end some time.
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(patience), int(patience % 1 * 1e6)))
    with there:
        command = COMMAND.format(descriptor=there.fileno(), parent_pid=own_pid_for_children())
        # -P: what lies in the current folder is not imported, unless it is for this process too.
        process = subprocess.Popen(  # noqa: S603 - a fixed command
            [sys.executable, "-P", "-c", command],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return _Rank(number, process, Connection(here.detach()))


def _send(rank: _Rank, content: bytes) -> None:
    try:
        rank.pipe.send_bytes(content)
    except OSError as error:
        raise CommunicationError(f"rank {rank.number} does not take messages ({error.strerror})") from error


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ended whose pipe is closed, in words."""
    try:
        status = process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    return f"killed by signal {-status} ({name})"
