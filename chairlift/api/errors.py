"""What a client is told when something is wrong: an HTTP status and the error body of the OpenAI API.

https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

MAX_SHOWN = 64
RETRY_AFTER_SECONDS = "1"
"""When to come back to a full queue: requests end all the time."""


class APIError(Exception):
    """A request that is answered by an error body.

    Attributes:
        status: HTTP status.
        message: says what to change.
        param: path of the field that is wrong, such as ``messages[0].content``, where it is one field.
        code: a word that programs can test for.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body as a JSON object: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = {429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer to send."""
        return JSONResponse(self.body, self.status, self.headers | dict(headers or {}))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400: the body is not what the API takes."""
    return APIError(400, message, param=param, code=code)


def engine_failed(cause: str, retry_after: float = 1.0) -> APIError:
    """A 503: the engine cannot answer, now or for this request. ``retry_after`` is in seconds."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return APIError(503, f"the engine failed: {cause}", code="engine_failed", headers=headers)


def queue_full(why: str) -> APIError:
    """A 429: there is more to do than may wait."""
    return APIError(
        429,
        f"the queue is full: {why}; try again later",
        code="queue_full",
        headers={"Retry-After": RETRY_AFTER_SECONDS},
    )


def shown(value: object) -> str:
    """Returns ``value`` as an error message shows it: whatever a client sent, in a bounded number of characters."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}…"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list):
        return f"an array of {len(value)} items"
    return json.dumps(value)[:MAX_SHOWN]
