"""Answers that take a while: sent as they come, and dropped the moment the client hangs up."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.api.errors import APIError

if TYPE_CHECKING:
    from chairlift.text.output import OutputDelta

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Writes JSON as compactly as it goes; a text becomes a JSON string without a detour."""

GOES_ON = '"finish_reason":null,"stop_reason":null'


def ending_of(delta: OutputDelta, finish_reason: str | None = None) -> str:
    """The fields of a choice that say whether and how it ended, as JSON without the braces.

    Args:
        delta: the newest of the choice.
        finish_reason: stands in for the delta's own.
    """
    if delta.finish_reason is None:
        return GOES_ON
    reason = finish_reason or delta.finish_reason
    return f'"finish_reason":{encode_json(reason)},"stop_reason":{encode_json(delta.stop_reason)}'


def event(data: object) -> bytes:
    """Returns ``data`` as a server-sent event.

    https://html.spec.whatwg.org/multipage/server-sent-events.html: JSON has no raw line break, so one line will do.
    """
    return f"data: {encode_json(data)}\n\n".encode()


class Answer:
    """What every part of one answer carries: its id, when it was made, and the model's name as the client wrote it."""

    def __init__(self, id_prefix: str, model: str) -> None:
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that a response object of this kind begins with."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def events(self, kind: str, *, include_usage: bool) -> Events:
        """The writer of this answer's stream."""
        return Events(self.head(kind), include_usage)


class Events:
    """Writes the chunks of one stream. Only what changes is encoded: this runs for every token of every stream.

    Args:
        head: the fields that each chunk begins with.
        include_usage: whether chunks have a field for the usage, null in all but the last, as the API has it then.
    """

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._head = f"data: {encode_json(head)[:-1]},"
        self._tail = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def choice(self, fields: str, usage: Mapping[str, Any] | None = None) -> bytes:
        """A chunk with one choice, whose fields are given as JSON without the braces, and maybe the usage so far."""
        tail = self._tail if usage is None else f'}}],"usage":{encode_json(usage)}}}\n\n'
        return f'{self._head}"choices":[{{{fields}{tail}'.encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk that has the usage, and no choice."""
        return f'{self._head}"choices":[],"usage":{encode_json(usage)}}}\n\n'.encode()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` until it ends or the client hangs up, which cancels it. Leaves no task behind.

    Args:
        receive: of a request whose body has been read, so that only a disconnect can come.
        work: what the client waits for.

    Raises:
        ClientDisconnect: the client hung up first.
        APIError: the server ends the request, with this answer; see :mod:`chairlift.api.lifecycle`.
    """
    working = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, hangup), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            hangup.result()  # raises what the request has to end with, if it was not a hang-up
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
    whenever the connection takes more, so that a slow reader delays nobody else.

    Args:
        chunks: whole events; closed when the client hangs up.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        # X-Accel-Buffering: nginx would else hold the text back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it all, or as much as the client waits for, or the server lets it have."""
        try:
            await unless_disconnected(receive, self._send_chunks(send))
        except ClientDisconnect:
            logger.debug("the client hung up")
        except Exception as error:
            if self._begun:
                await send({"type": "http.response.body", "body": event(_told(error).body), "more_body": False})
            elif isinstance(error, APIError):
                await error.response()(scope, receive, send)
            else:
                raise

    async def _send_chunks(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                if not self._begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    self._begun = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _told(error: Exception) -> APIError:
    """What a client is told of ``error`` in the middle of a stream; what nobody foresaw is logged."""
    if isinstance(error, APIError):
        return error
    logger.error("a stream failed", exc_info=error)
    return APIError(500, "internal error")
