"""A client's request, as far as the router must understand it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from random import getrandbits
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from chairlift.api.errors import APIError

REQUEST_ID = "x-request-id"
SANE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CANARIED = frozenset({COMPLETIONS, CHAT, "/v1/embeddings", "/v1/responses"})
"""Paths whose POST is split between the sides. Everything else is the main side's: files, batches, lists of models."""
STATELESS = frozenset({COMPLETIONS, CHAT, "/v1/embeddings"})

OVERLOADED = (408, 429)
"""Statuses below 500 that are no fault of the request."""

HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that are between two ends of one connection: RFC 9110, section 7.6.1."""
NOT_SENT_ON = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}


@dataclass(slots=True)
class ClientRequest:
    """One request, body included.

    Attributes:
        method: such as ``POST``.
        path: without the query, decoded.
        target: path and query, as they came.
        headers: by their names in lower case, as they are sent on.
        body: as it came.
        json: the body, if it is a JSON object on a path that is split.
        address: of the client.
        request_id: the client's, or one of our own.
    """

    method: str
    path: str
    target: str
    headers: dict[str, str]
    body: bytes
    json: dict[str, Any] | None
    address: str
    request_id: str

    @property
    def canaried(self) -> bool:
        """Whether it is split between the sides."""
        return self.method == "POST" and self.path in CANARIED

    @property
    def repeatable(self) -> bool:
        """Whether sending it twice does no more than sending it once: it only reads, or leaves nothing behind."""
        if self.method in ("GET", "HEAD", "OPTIONS"):
            return True
        stores = self.json is not None and bool(self.json.get("store"))
        return self.method == "POST" and self.path in STATELESS and not stores

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self.json is not None and bool(self.json.get("stream"))


async def read_request(scope: Scope, receive: Receive, max_body_bytes: int) -> ClientRequest:
    """Reads a request to its end. Never holds more than ``max_body_bytes`` and one read of the socket.

    Raises:
        APIError: 413 if the body is too large.
        ClientDisconnect: the client hung up before its end.
    """
    headers = end_to_end((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared[:20]) > max_body_bytes:
        raise _too_large(max_body_bytes)
    pieces: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_body_bytes:
            raise _too_large(max_body_bytes)
        pieces.append(piece)
        more = message.get("more_body", False)
    body = b"".join(pieces)

    address = scope["client"][0] if scope.get("client") else "unknown"
    offered = headers.get(REQUEST_ID, "")
    request_id = offered if SANE_REQUEST_ID.fullmatch(offered) else f"{getrandbits(128):032x}"
    headers[REQUEST_ID] = request_id
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    method, path = scope["method"], scope["path"]
    decoded = _decode(body) if method == "POST" and path in CANARIED else None
    return ClientRequest(method, path, target, headers, body, decoded, address, request_id)


def end_to_end(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the headers that are sent on, by their names in lower case; what one hop agreed on stays behind."""
    kept: dict[str, str] = {}
    for name, value in headers:
        name = name.lower()
        between = "; " if name == "cookie" else ", "
        kept[name] = f"{kept[name]}{between}{value}" if name in kept else value
    named = {name.strip().lower() for name in kept.get("connection", "").split(",")}
    return {name: value for name, value in kept.items() if name not in NOT_SENT_ON and name not in named}


def _decode(body: bytes) -> dict[str, Any] | None:
    """The body, if it is a JSON object; whatever else it is, the side that gets it will say so."""
    try:
        decoded = from_json(body)
    except ValueError:
        return None
    return decoded if isinstance(decoded, dict) else None


def _too_large(max_bytes: int) -> APIError:
    return APIError(413, f"the body is larger than the limit of {max_bytes} bytes", code="request_too_large")
