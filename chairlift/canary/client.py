"""The client's end of an exchange."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Message, Receive, Send

from chairlift.canary.connection import NO_BODY_STATUSES
from chairlift.canary.request import REQUEST_ID
from chairlift.canary.samples import Sample

SIDE = b"x-chairlift-canary"
Headers = Iterable[tuple[bytes, bytes]]


class ClientStalledError(Exception):
    """The client did not take its answer."""


class Client:
    """Writes an answer to whoever asked, no faster than they read.

    Args:
        send: of the server.
        request_id: is in the answer's headers.
        has_room: says whether the server would pass a piece on without waiting for the client to read.
        patience: seconds that it may take the client to read what came before.

    Attributes:
        started: whether the status and headers have gone out, so that nothing can be taken back.
        left: the client hung up.
    """

    def __init__(self, send: Send, request_id: str, has_room: Callable[[], bool], patience: float) -> None:
        self._send = send
        self._has_room = has_room
        self._patience = patience
        self._request_id = request_id.encode("latin-1")
        self._finished = False
        self.started = False
        self.left = False

    async def start(self, status: int, headers: Headers, side: str) -> None:
        """Sends status and headers, with which side they come from.

        Raises:
            ClientStalledError: as all that sends.
        """
        self.started = True
        dropped = {REQUEST_ID.encode()}
        if status in NO_BODY_STATUSES:
            dropped.add(b"content-length")  # of a body that does not come, and that the server would wait for
        kept = [(name, value) for name, value in headers if name not in dropped]
        kept += [(REQUEST_ID.encode(), self._request_id), (SIDE, side.encode())]
        await self._put({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, data: bytes, sample: Sample) -> None:
        """Sends a piece of the body. The time in which the client does not take it is not held against ``sample``."""
        sample.block(time.monotonic())
        try:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            sample.unblock(time.monotonic())

    @property
    def has_room(self) -> bool:
        """Whether the status has gone out and a piece could follow at once, without waiting for the client to read."""
        return self.started and self._has_room()

    def write_at_once(self, data: bytes) -> None:
        """Sends a piece of the body here and now, without a task. Only while it has room."""
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            sending.send(None)  # type: ignore[attr-defined]  # a coroutine, which has nothing to wait for
        except StopIteration:
            return
        raise RuntimeError("the server waits with a piece that it had room for")

    async def finish(self) -> None:
        """Ends the body."""
        self._finished = True
        await self._put({"type": "http.response.body", "body": b""})

    async def _put(self, message: Message) -> None:
        if self._has_room():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError:
            raise ClientStalledError(f"the client read nothing for {self._patience:g} s") from None

    @asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """Cancels what happens inside the moment the client hangs up, and then leaves quietly."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it is what runs this

        async def watch() -> None:
            message: dict[str, Any] = {"type": ""}
            while message["type"] != "http.disconnect":
                message = dict(await receive())
            if not self._finished:
                self.left = True
                task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not self.left:
                raise
            task.uncancel()
        finally:
            watcher.cancel()


class Nobody(Client):
    """Takes everything at once and drops it."""

    def __init__(self) -> None:
        async def drop(_: Any) -> None:
            pass

        super().__init__(drop, "", lambda: True, math.inf)
