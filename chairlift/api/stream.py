"""Answers that take a while: sent as they come, and dropped the moment the client hangs up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.api.errors import APIError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Writes JSON as compactly as it goes; a text becomes a JSON string without a detour."""


def event(data: object) -> bytes:
    """Returns ``data`` as a server-sent event.

    https://html.spec.whatwg.org/multipage/server-sent-events.html: JSON has no raw line break, so one line will do.
    """
    return f"data: {encode_json(data)}\n\n".encode()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` until it ends or the client hangs up, which cancels it. Leaves no task behind.

    Args:
        receive: of a request whose body has been read, so that only a disconnect can come.
        work: what the client waits for.

    Raises:
        ClientDisconnect: the client hung up first.
    """
    working = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, hangup), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        hangup.cancel()
        await asyncio.gather(working, hangup, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events.

    The answer begins with the first chunk, so that what goes wrong before is still told by a status: an
    :class:`APIError` becomes the whole answer. Later on it becomes an event, the last one. Chunks are pulled, one
    whenever the connection takes more, so that a slow reader finds the text merged and not a queue of chunks.

    Args:
        chunks: whole events; closed when the client hangs up.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        # X-Accel-Buffering: nginx would else hold the text back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it all, or as much as the client waits for."""
        try:
            await unless_disconnected(receive, self._send_all(scope, receive, send))
        except ClientDisconnect:
            logger.debug("the client hung up")

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if not started:
                    if not isinstance(error, APIError):
                        raise
                    await error.response()(scope, receive, send)
                    return
                if not isinstance(error, APIError):
                    logger.exception("a stream failed")
                    error = APIError(500, "internal error")
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
