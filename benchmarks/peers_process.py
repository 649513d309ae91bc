"""A driver of the comparison as its parent sees it: started, asked, checked, and stopped between its turns.

The other end of the line is benchmarks/peers/driver.py, which also shows the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil

Request = dict[str, Any]
STOP_TIMEOUT = 30.0


class PeerError(RuntimeError):
    """An engine that did not start, ended, took too long, or did other work than it was asked to."""


class PeerEndedError(PeerError):
    """The engine's process ended by itself."""


class Turn(NamedTuple):
    """One run of one engine.

    Attributes:
        seconds: from handing the requests over to the last answer, by the driver's clock.
        first_tokens: of each answer; ``None`` where the engine tells only text.
        others: cores that anybody else kept busy meanwhile, on average: above a few hundredths the run is disturbed.
    """

    seconds: float
    first_tokens: list[int | None]
    others: float


def check_answers(requests: Sequence[Request], answers: Sequence[Mapping[str, Any]]) -> None:
    """Whether an engine did exactly the work of ``requests``.

    Raises:
        PeerError: an answer is missing, is not as long as asked, or is to a prompt of another length.
    """
    if len(answers) != len(requests):
        raise PeerError(f"{len(answers)} answers to {len(requests)} requests")
    for request, answer in zip(requests, answers, strict=True):
        if answer["output_tokens"] != request["out"]:
            raise PeerError(
                f"request {request['id']}: {answer['output_tokens']} tokens instead of exactly {request['out']}"
            )
        read = answer["prompt_tokens"]
        if read is not None and read != len(request["prompt"]):
            raise PeerError(f"request {request['id']}: read {read} prompt tokens instead of {len(request['prompt'])}")


class DriverProcess:
    """A driver in a process group of its own. It lives through the whole comparison, and sleeps between its turns.

    ``pause`` stops every process of the group, so that no thread of an idle engine can spin on the cores that another
    is measured on; ``run`` wakes it up.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], start_timeout: float, turn_timeout: float
    ) -> None:
        """Starts the driver and waits until its engine is ready; ``start_seconds`` is how long that took.

        Raises:
            PeerError: it could not be started.
        """
        self._turn_timeout = turn_timeout
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed by close()
        started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"cannot start {command[0]}: {error}") from error
        try:
            self.description: str = self._receive(start_timeout)["description"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - started

    def run(self, requests: Sequence[Request]) -> Turn:
        """Has the engine compute all requests at once.

        Raises:
            PeerError: it failed, or its answers are not what was asked for.
        """
        self._signal(signal.SIGCONT)
        busy, own = _busy_seconds(), self.cpu_seconds()
        started = time.monotonic()
        message = json.dumps({"requests": list(requests)}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise PeerEndedError(f"ended before its turn: {self._last_line()}") from error
        reply = self._receive(self._turn_timeout)
        check_answers(requests, reply["answers"])
        elapsed = time.monotonic() - started
        others = (_busy_seconds() - busy - (self.cpu_seconds() - own)) / elapsed
        return Turn(reply["seconds"], [answer["first_token"] for answer in reply["answers"]], max(0.0, others))

    def pause(self) -> None:
        """Stops all processes of the group until the next run."""
        self._signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """What the driver and all below it have computed so far."""
        total = 0.0
        try:
            driver = psutil.Process(self._process.pid)
            for process in (driver, *driver.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
        return total

    def _receive(self, timeout: float) -> dict[str, Any]:
        """The next message, whatever its pieces, within ``timeout`` seconds."""
        assert self._process.stdout is not None
        descriptor, end, line = self._process.stdout.fileno(), time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerError(f"no answer within {timeout:.0f} s: {self._last_line()}")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise PeerEndedError(self._end())
            line += piece
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerError(message["error"])
        return message

    def _end(self) -> str:
        try:
            status = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"closed its line but lives on: {self._last_line()}"
        how = signal.strsignal(-status) if status < 0 else f"status {status}"
        return f"ended with {how}: {self._last_line()}"

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends the driver and everything it started."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def _busy_seconds() -> float:
    """CPU seconds that the whole machine has spent on anything but waiting."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice
