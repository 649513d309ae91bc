"""The driver's end of the line: what every engine of the comparison is asked, and how it answers.

A driver is a process with one engine. It reads a line of JSON per command and answers each with one, over pipes that it
keeps for itself: whatever libraries print goes to the standard error output. This file and the drivers run under the
interpreters of the peers' environments, so they need the standard library and the engine alone.

    -> {"requests": [{"id": 0, "prompt": [1, 2], "out": 8}, ...]}
    <- {"seconds": 1.5, "answers": [{"output_tokens": 8, "prompt_tokens": 2, "first_token": 7}, ...]}
    <- {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple, Protocol

PR_SET_PDEATHSIG = 1


class Request(NamedTuple):
    """A prompt as token ids, and how many tokens to generate after it: exactly so many, greedily."""

    prompt: list[int]
    out: int


class Answer(NamedTuple):
    """What an engine says of a request when it is done.

    Attributes:
        output_tokens: how many it generated.
        prompt_tokens: how many it read, by its own count; ``None`` where it does not tell.
        first_token: the first of those generated; ``None`` where it tells only text.
    """

    output_tokens: int
    prompt_tokens: int | None = None
    first_token: int | None = None


class Settings(NamedTuple):
    """What a driver starts its engine with.

    Attributes:
        model: directory that holds the model in each engine's own format.
        precision: "bf16" or "int8".
        max_num_seqs: most sequences at a time.
        cores: compute threads.
        options: of this engine alone, by their own names, over the defaults of its driver.
    """

    model: str
    precision: str
    max_num_seqs: int
    cores: int
    options: dict[str, Any]


class Engine(Protocol):
    """What a driver makes. ``description`` names the engine, its version and what it was tuned with."""

    description: str

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Computes all requests, submitted at once, and returns when the last one is done."""
        ...

    def close(self) -> None:
        """Frees what outlives the process, such as a server."""
        ...


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent dies, even if it is stopped then."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(make: Callable[[Settings], Engine]) -> None:
    """Makes the engine, says so, and answers commands until the standard input ends."""
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that servers are closed
    try:
        engine = make(Settings(**json.loads(sys.argv[1])))
    except Exception as error:
        _reply(replies, {"error": describe_error(error)})
        raise
    try:
        _reply(replies, {"description": engine.description})
        for line in sys.stdin:
            _reply(replies, _run(engine, json.loads(line)))
    finally:
        engine.close()


def _run(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    requests = [Request(request["prompt"], request["out"]) for request in command["requests"]]
    try:
        started = time.perf_counter()
        answers = engine.run(requests)
        seconds = time.perf_counter() - started
    except Exception as error:
        return {"error": describe_error(error)}
    return {"seconds": seconds, "answers": [answer._asdict() for answer in answers]}


def describe_error(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else ''}"[:500]


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
