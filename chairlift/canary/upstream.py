"""One of the two servers: how a request is put to it, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json
from yarl import URL

from chairlift.canary.adapter import Adapter, AdapterError, as_events
from chairlift.canary.config import Timeouts
from chairlift.canary.request import CHAT, COMPLETIONS, HOP_BY_HOP, REQUEST_ID, ClientRequest

KEEP_ALIVE_SECONDS = 4.0
"""Idle connections are closed before the usual servers do it (uvicorn after 5 s), or now and then a request would go
out on one that is just being closed."""
NOT_SENT_BACK = HOP_BY_HOP | {"date"}
"""The router's own server dates its answers."""
MOST_ANSWER_BYTES = 64 * 1024 * 1024


class UpstreamError(Exception):
    """No answer, or not the whole of it.

    Attributes:
        reached: whether the server may have seen the request.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


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
    _response: aiohttp.ClientResponse | None = None
    _body: bytes = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the body as it comes.

        Raises:
            UpstreamError: it broke off.
        """
        if self._response is None:
            yield self._body
            return
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"the connection broke: {_cause(error)}") from error

    async def read(self, most: int = MOST_ANSWER_BYTES) -> bytes:
        """Returns the whole body.

        Raises:
            UpstreamError: it broke off, or is larger than ``most``.
        """
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > most:
                raise UpstreamError(f"the answer is larger than {most} bytes")
        return bytes(body)

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connection unless the answer was read to its end, so that the server stops at once."""
        if self._response is not None:
            if self._response.content.at_eof():
                self._response.release()
            else:
                self._response.close()


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
        self.url = url
        self._key = key
        self._adapter = adapter
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None

    async def open(self, request: ClientRequest) -> Reply:
        """Sends a request and returns the answer when its headers are there. Close it by leaving its context.

        Raises:
            UpstreamError: there is no answer.
            AdapterError: the request cannot be put to this server.
        """
        if self._adapter is not None and request.canaried:
            return await self._open_adapted(self._adapter, request)
        response = await self._send(request.method, self.url + request.target, request, request.body)
        raw = response.raw_headers
        named = {name.strip().lower() for name in response.headers.get("connection", "").split(",")}
        headers = [
            (name.lower(), value)
            for name, value in raw
            if (lower := name.lower().decode("latin-1")) not in NOT_SENT_BACK and lower not in named
        ]
        return Reply(response.status, headers, response.content_type == "text/event-stream", response)

    async def probe(self, path: str, seconds: float) -> str | None:
        """Returns why the server is not well; ``None`` if it answers at all, as not every one has a health check."""
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._client().get(URL(self.url + path, encoded=True), timeout=timeout) as response:
                return None if response.status < 500 else f"{path} answers {response.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{path}: {_cause(error)}"

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        """Made when the loop runs, since it belongs to it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            )
        return self._session

    async def _send(self, method: str, url: str, request: ClientRequest, body: bytes) -> aiohttp.ClientResponse:
        headers = {**request.headers, "accept-encoding": "identity"}
        forwarded = request.headers.get("x-forwarded-for")
        headers["x-forwarded-for"] = f"{forwarded}, {request.address}" if forwarded else request.address
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            return await self._client().request(
                method, URL(url, encoded=True), data=body or None, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(f"cannot connect: {_cause(error)}", reached=False) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamError(f"no answer: {_cause(error)}") from error

    async def _open_adapted(self, adapter: Adapter, request: ClientRequest) -> Reply:
        if request.path not in (COMPLETIONS, CHAT) or request.json is None:
            raise AdapterError(f"this server takes JSON objects at {COMPLETIONS} and {CHAT}")
        path, body = adapter.request(request.path, request.json)
        response = await self._send("POST", self.url + path, _as_json(request), to_json(body))
        headers = [(b"content-type", b"application/json")]
        async with Reply(response.status, headers, is_events=False, _response=response) as whole:
            content = await whole.read()
        if response.status != 200:
            return Reply(response.status, headers, is_events=False, _body=content)
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


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer within the time limit"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__
