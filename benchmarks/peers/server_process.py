"""A server of the comparison: started by its driver, asked for everything at once over HTTP, and stopped.

The client shares the cores with the server it measures, so it does the least: one thread, bytes kept as they come and
read only when the last answer is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from driver import end_with_parent

HOST = "127.0.0.1"
START_TIMEOUT = 600.0
STOP_TIMEOUT = 20.0


class ServerError(RuntimeError):
    """The server did not start, or did not answer as it should."""


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """A running server. ``command`` must make it listen on ``port``; it is ready when ``/health`` answers 200."""

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        self.port = port
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            preexec_fn=end_with_parent,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerError(f"server ended with status {self._process.returncode}: {self._last_line()}")
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise ServerError(f"server not ready after {START_TIMEOUT:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"

    def post(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Sends all bodies at once, each on a connection of its own, and returns the answers' bodies in order.

        Raises:
            ServerError: a connection broke, or an answer's status is not 200.
        """
        heads = [_request(path, self.port, json.dumps(body).encode()) for body in bodies]
        try:
            answers = asyncio.run(self._exchange(heads))
        except OSError as error:
            raise ServerError(f"{path}: {error}; the server's last line: {self._last_line()}") from error
        return [_body(answer) for answer in answers]

    async def _exchange(self, requests: Sequence[bytes]) -> list[bytes]:
        return await asyncio.gather(*(self._one(request) for request in requests))

    async def _one(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _request(path: str, port: int, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _body(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.split(b"\r\n")
    if b"transfer-encoding: chunked" in (field.lower() for field in fields):
        body = _unchunk(body)
    if status.split(b" ")[1:2] != [b"200"]:
        raise ServerError(f"{status.decode(errors='replace')}: {body[:300].decode(errors='replace')}")
    return body


def _unchunk(body: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            return b"".join(parts)
        parts.append(rest[:length])
        body = rest[length + 2 :]


def events(body: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, without the closing ``[DONE]``."""
    lines = (line[5:].strip() for line in body.splitlines() if line.startswith(b"data:"))
    return [json.loads(line) for line in lines if line != b"[DONE]"]
