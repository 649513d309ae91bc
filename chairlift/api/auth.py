"""Who may use the API: whoever shows one of its keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.api.errors import APIError
from chairlift.api.paths import PROBES, path_of


class RequireKey:
    """Answers 401 to requests without a known key in ``Authorization: Bearer KEY``, but for probes and metrics.

    How long the comparison takes tells nothing about the keys: digests are compared, all of them, each in constant
    time.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] == "http" and path_of(scope) not in PROBES:
            problem = self._problem(Headers(scope=scope).get("authorization", ""))
            if problem is not None:
                await _refusal(problem).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, authorization: str) -> str | None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return "this server wants an API key; send the header Authorization: Bearer KEY"
        # Headers are decoded as Latin-1, byte for byte.
        shown = _digest(key.strip().encode("latin-1"))
        known = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return None if any(known) else "the API key is not one of this server's"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(problem: str) -> APIError:
    return APIError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
