"""Requests that are open, and how the server ends them: out of time, or because it shuts down.

Handlers need not know. A request that has to end hears of it where it would hear of a hang-up: its ``receive`` raises
the :class:`APIError` to answer with, which a handler that waits by :func:`~chairlift.api.stream.unless_disconnected`
passes on, after its work is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.api.errors import APIError, queue_full
from chairlift.api.paths import CONTROLS, PROBES, path_of

logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""Time for a body to come, whatever an answer may take: each that does not come holds a place."""
ENDED_BY = "chairlift.ended_by"
"""Key of a scope under which the code of the error stands that ended the request."""


class OpenRequest:
    """A request that is being answered, and may have to end before it wants to."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._end: asyncio.Future[APIError] = asyncio.get_running_loop().create_future()
        self._body_is_here = False

    def end(self, error: APIError) -> None:
        """Makes :meth:`receive` raise ``error``, now and later. Only the first counts."""
        if not self._end.done():
            self._scope[ENDED_BY] = error.code
            self._end.set_result(error)

    def time_out(self, seconds: float) -> None:
        """Ends it because its time is over."""
        self.expect_body(seconds)
        message = f"the answer was not complete after {seconds:g} seconds, which is this server's limit"
        self.end(APIError(504, f"{message}; ask for fewer tokens", code="request_timeout"))

    def expect_body(self, seconds: float) -> None:
        """Ends it unless its body has come by now, after so many seconds."""
        if not self._body_is_here:
            message = f"the request's body did not arrive within {seconds:g} seconds"
            self.end(APIError(408, message, code="request_timeout", headers={"Connection": "close"}))

    async def receive(self) -> Message:
        """The ASGI ``receive`` of this request.

        Raises:
            APIError: the request has to end.
        """
        receiving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((receiving, self._end), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                raise self._end.result()
            message = receiving.result()
        finally:
            receiving.cancel()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._body_is_here = True
        return message


class Lifecycle:
    """Whether the server takes requests, and those that it is answering.

    Args:
        request_timeout: seconds that a request may take; ``None`` for any time.
        max_open: most requests at once; further ones get a 429 before anything of their body is kept.
    """

    def __init__(self, request_timeout: float | None = None, max_open: int | None = None) -> None:
        self.draining = False
        self.open: set[OpenRequest] = set()
        self._timeout = request_timeout
        self._max_open = max_open
        self._on_drain: list[Callable[[], None]] = []

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Calls back when the server stops taking requests."""
        self._on_drain.append(callback)

    def drain(self) -> None:
        """Takes no more requests. Those that are open go on."""
        if not self.draining:
            self.draining = True
            logger.info("shutting down: no more requests are taken, %d are open", len(self.open))
            for callback in self._on_drain:
                callback()

    def end_all(self, error: APIError) -> None:
        """Ends every open request with ``error``."""
        for request in list(self.open):
            request.end(error)

    def refusal(self, path: str) -> APIError | None:
        """What a request for ``path`` that comes now is to be told instead of an answer, if anything."""
        if self.draining:
            return shutting_down()
        if path not in CONTROLS and self._max_open is not None and len(self.open) >= self._max_open:
            return queue_full(f"{len(self.open)} requests are being answered, and at most {self._max_open} may be")
        return None

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs ``app`` for one request, which counts as open meanwhile."""
        request = OpenRequest(scope, receive)
        self.open.add(request)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(BODY_SECONDS, request.expect_body, BODY_SECONDS)]
        if self._timeout is not None:
            timers.append(loop.call_later(self._timeout, request.time_out, self._timeout))
        try:
            await app(scope, request.receive, send)
        finally:
            for timer in timers:
                timer.cancel()
            self.open.discard(request)


class Admission:
    """Middleware: refuses what cannot be taken, and keeps account of what is. Probes pass."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] != "http" or (path := path_of(scope)) in PROBES:
            await self._app(scope, receive, send)
        elif (refusal := self._lifecycle.refusal(path)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._lifecycle.run(self._app, scope, receive, send)


def shutting_down() -> APIError:
    """A 503: the server ends, and this request with it."""
    return APIError(
        503,
        "the server is shutting down; send the request again, to another one if there is one",
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )
