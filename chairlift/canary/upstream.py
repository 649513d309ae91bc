"""One of the two servers: how a request is put to it, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pydantic_core import from_json, to_json

from chairlift.canary.adapter import Adapter, AdapterError, as_events
from chairlift.canary.config import Timeouts
from chairlift.canary.connection import Connection, Connections, Take, UpstreamError
from chairlift.canary.request import CHAT, COMPLETIONS, HOP_BY_HOP, REQUEST_ID, ClientRequest

NOT_SENT_BACK = frozenset(name.encode() for name in HOP_BY_HOP) | {b"date"}
"""The router's own server dates its answers."""
MOST_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Reply:
    """An answer of which the headers are there.

    Attributes:
        status: HTTP status.
        headers: those that are sent on.
        is_events: whether the body is a stream of events.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    is_events: bool
    _connection: Connection | None = None
    _body: bytes = b""

    def piece(self, take: Take | None = None) -> Awaitable[bytes]:
        """Returns what comes of the body, as :meth:`chairlift.canary.connection.Connection.piece` does."""
        return self._rest() if self._connection is None else self._connection.piece(take)

    async def _rest(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def read(self, most: int = MOST_ANSWER_BYTES) -> bytes:
        """Returns the whole body.

        Raises:
            UpstreamError: it broke off, or is larger than ``most``.
        """
        body = bytearray()
        while piece := await self.piece():
            body += piece
            if len(body) > most:
                raise UpstreamError(f"the answer is larger than {most} bytes")
        return bytes(body)

    def __enter__(self) -> Reply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connection unless the answer was read to its end, so that the server stops at once."""
        if self._connection is not None:
            self._connection.release()


class Upstream:
    """A server.

    Args:
        name: ``stable`` or ``candidate``.
        url: its base URL.
        timeouts: only ``connect`` is kept here; the rest is the watchdog's.
        key: put in the place of the client's ``Authorization``, if given.
        adapter: if the server is not OpenAI-shaped.
    """

    def __init__(
        self, name: str, url: str, timeouts: Timeouts, *, key: str | None = None, adapter: Adapter | None = None
    ) -> None:
        self.name = name
        self.connections = Connections(url, timeouts.connect)
        self._key = key
        self._adapter = adapter

    async def open(self, request: ClientRequest) -> Reply:
        """Sends a request and returns the answer when its headers are there. Close it by leaving its context.

        Raises:
            UpstreamError: there is no answer.
            AdapterError: the request cannot be put to this server.
        """
        if self._adapter is not None and request.canaried:
            return await self._open_adapted(self._adapter, request)
        connection = await self._send(request.method, request.target, request, request.body)
        dropped = set(NOT_SENT_BACK)
        content_type = b""
        for name, value in connection.headers:
            if name == b"connection":
                dropped |= {named.strip().lower() for named in value.split(b",")}
            elif name == b"content-type":
                content_type = value.partition(b";")[0].strip().lower()
        headers = [(name, value) for name, value in connection.headers if name not in dropped]
        is_events = content_type == b"text/event-stream"
        return Reply(connection.status, headers, is_events, connection)

    async def probe(self, path: str, seconds: float) -> str | None:
        """Returns why the server is not well; ``None`` if it answers at all, as not every one has a health check."""
        try:
            async with asyncio.timeout(seconds):
                connection = await self.connections.request("GET", path, {}, b"")
        except TimeoutError:
            return f"{path}: no answer within the time limit"
        except UpstreamError as error:
            return f"{path}: {error}"
        connection.release()
        return None if connection.status < 500 else f"{path} answers {connection.status}"

    def close(self) -> None:
        """Closes all connections that are idle."""
        self.connections.close()

    async def _send(self, method: str, target: str, request: ClientRequest, body: bytes) -> Connection:
        headers = {**request.headers, "accept-encoding": "identity"}
        forwarded = request.headers.get("x-forwarded-for")
        headers["x-forwarded-for"] = f"{forwarded}, {request.address}" if forwarded else request.address
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        return await self.connections.request(method, target, headers, body)

    async def _open_adapted(self, adapter: Adapter, request: ClientRequest) -> Reply:
        if request.path not in (COMPLETIONS, CHAT) or request.json is None:
            raise AdapterError(f"this server takes JSON objects at {COMPLETIONS} and {CHAT}")
        path, body = adapter.request(request.path, request.json)
        connection = await self._send("POST", path, _as_json(request), to_json(body))
        headers = [(b"content-type", b"application/json")]
        with Reply(connection.status, headers, is_events=False, _connection=connection) as whole:
            content = await whole.read()
        if connection.status != 200:
            return Reply(connection.status, headers, is_events=False, _body=content)
        try:
            decoded: Any = from_json(content)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise UpstreamError("the answer is no JSON object")
        try:
            answer = adapter.answer(request.path, request.json, decoded)
        except AdapterError as error:
            raise UpstreamError(str(error)) from error
        if request.streams:
            return Reply(200, [(b"content-type", b"text/event-stream")], is_events=True, _body=as_events(answer))
        return Reply(200, headers, is_events=False, _body=to_json(answer))


def _as_json(request: ClientRequest) -> ClientRequest:
    headers = {**request.headers, "content-type": "application/json", REQUEST_ID: request.request_id}
    return ClientRequest(
        request.method, request.path, request.target, headers, request.body, request.json, request.address,
        request.request_id,
    )  # fmt: skip
