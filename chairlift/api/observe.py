"""What is kept of every request: a label, a count, a line in the log, and a span in a trace."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.api.lifecycle import ENDED_BY
from chairlift.api.paths import PROBES, path_of
from chairlift.api.tracing import SpanWriter
from chairlift.engine.account import RequestAccount, current_account
from chairlift.engine.metrics import EngineMetrics

logger = logging.getLogger("chairlift.request")

REQUEST_ID = "x-request-id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody waits for; it is never sent, but logs and metrics show it."""
SANE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Observe:
    """Middleware around everything else.

    Answers with the client's ``X-Request-Id``, if it can be written to a log as it is, or else with one of its own. It
    is only a label: the engine's ids are its own.
    """

    def __init__(self, app: ASGIApp, metrics: EngineMetrics, log: bool, spans: SpanWriter | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and keeps what there is to keep of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        offered = headers.get(REQUEST_ID, "")
        request_id = offered if SANE_REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        answer = _Answer(scope)
        account = RequestAccount()
        token = current_account.set(account)

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                answer.begin(message)
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        except Exception:
            answer.status = 500  # which the server makes of it
            raise
        finally:
            current_account.reset(token)
            self._metrics.on_response(scope["method"], answer.handler, answer.status)
            if self._log and path_of(scope) not in PROBES:
                logger.info("request", extra={"fields": answer.fields() | _account_fields(account)})
            if self._spans is not None and account.sequences:
                self._spans.write(request_id, answer.fields(), account, headers)


class _Answer:
    """The answer to one request, as the log tells of it."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._begun = time.monotonic()
        self._stream = False
        self.status = CLIENT_CLOSED_REQUEST  # unless an answer begins

    def begin(self, start: Message) -> None:
        """Takes the head of the answer."""
        self.status = start["status"]
        self._stream = Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")

    @property
    def handler(self) -> str:
        """The path of the route that the request is for, of which there are few, or "none".

        Of a request that was refused before it was routed, only a path without parameters is known.
        """
        route = self._scope.get("route")
        if route is not None:
            return str(route.path)
        path = path_of(self._scope)
        return path if any(getattr(route, "path", None) == path for route in self._scope["app"].routes) else "none"

    def fields(self) -> dict[str, Any]:
        """What there is to say, by name."""
        scope = self._scope
        fields = {
            "request_id": scope[REQUEST_ID],
            "method": scope["method"],
            "path": path_of(scope)[:128],
            "status": self.status,
            "stream": self._stream,
            "seconds": round(time.monotonic() - self._begun, 6),
        }
        return fields | ({"ended_by": scope[ENDED_BY]} if ENDED_BY in scope else {})


def _account_fields(account: RequestAccount) -> dict[str, Any]:
    if not account.sequences:
        return {}
    times = {
        "queue_seconds": account.queue,
        "prefill_seconds": account.prefill,
        "decode_seconds": account.decode,
        "time_to_first_token_seconds": account.time_to_first_token,
    }
    return {
        "sequences": account.sequences,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "completion_tokens": account.completion_tokens,
        "preemptions": account.preemptions,
        "finish_reasons": account.finish_reasons,
        **{name: round(seconds, 6) for name, seconds in times.items() if seconds is not None},
    }
