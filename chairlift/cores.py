"""The cores that threads run on, by the numbers that the system gives them. Only Linux lets a thread be bound."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
CAN_BIND = hasattr(os, "sched_setaffinity")
ALLOWED: frozenset[int] = frozenset(os.sched_getaffinity(0)) if CAN_BIND else frozenset()
"""Those that this process may use, before any of its threads is bound."""


class Threads(Protocol):
    """Threads that run a function together, each with its number."""

    count: int

    def run(self, kernel: Any, *arguments: Any) -> None:
        """Calls ``kernel(thread, *arguments)`` on each, the caller as the first."""
        ...


def parse_cores(text: str, allowed: Collection[int] = ALLOWED) -> tuple[int, ...]:
    """The cores of a list such as ``0-3,8``, in its order; of ``auto`` all those that are ``allowed``.

    Raises:
        ValueError: it is no such list, or names a core twice or one that cannot be had.
    """
    if text == "auto":
        return tuple(sorted(allowed))
    cores: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"it must be auto, or cores such as 0-3,8; got {text!r}")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{part.strip()} runs backwards")
        for core in range(first, last + 1):
            if core not in allowed:
                raise ValueError(f"there is no core {core} that this process may use; it may use {_written(allowed)}")
            if core in cores:
                raise ValueError(f"core {core} is named twice, and threads that share a core wait for one another")
            cores.append(core)
    return tuple(cores)


def _written(cores: Collection[int]) -> str:
    """As :func:`parse_cores` reads them."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def bind(threads: Threads, cores: Sequence[int]) -> None:
    """Binds each thread to a core of its own, the caller to the first.

    Raises:
        OSError: the system refuses.
    """
    everybody = threading.Barrier(threads.count)
    refused: list[OSError] = []

    def bind_one(thread: int) -> None:
        try:
            os.sched_setaffinity(0, {cores[thread]})
        except OSError as error:
            refused.append(error)
            everybody.abort()
            raise
        everybody.wait()  # until then no thread can take a second core

    global _unbound
    _unbound = _unbound or os.sched_getaffinity(0)
    try:
        threads.run(bind_one)
    except (OSError, threading.BrokenBarrierError):
        unbind()
        raise refused[0] from None


def usable() -> int:
    """How many cores the calling thread may use, or could before it was bound."""
    return len(_unbound or os.sched_getaffinity(0)) if CAN_BIND else os.cpu_count() or 1


_unbound: set[int] | None = None
"""What the caller of :func:`bind` could use before."""


def unbind() -> None:
    """Lets the calling thread use again what could be used before :func:`bind`; a thread begins bound if the one that
    starts it is."""
    if _unbound is not None:
        with contextlib.suppress(OSError):  # none of them is left to this process
            os.sched_setaffinity(0, _unbound)
