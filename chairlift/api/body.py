"""Reads a request's body: JSON, within bounds, or a 4xx."""

from __future__ import annotations

from pydantic_core import from_json
from starlette.requests import Request

from chairlift.api.errors import APIError, bad_request


async def read_json(request: Request, max_bytes: int) -> object:
    """Returns the body, decoded. Never holds more than ``max_bytes`` and one read of the socket.

    Raises:
        APIError: 415 if it is not said to be JSON, 413 if it is too large, 400 if it is no JSON.
        ClientDisconnect: the client hung up before its end.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(415, f"set the header Content-Type: application/json, not {content_type[:64] or 'none'!r}")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    try:
        # Strict where Python's own decoder is not: no NaN, no lone surrogates, and a bounded depth.
        return from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _too_large(max_bytes: int) -> APIError:
    return APIError(413, f"the body is larger than the limit of {max_bytes} bytes", code="request_too_large")
