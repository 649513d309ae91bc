"""What operators ask of the router: its state, and to promote, hold, resume or roll back."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from chairlift.api.errors import APIError
from chairlift.canary.rollout import NotNowError
from chairlift.engine.metrics import CONTENT_TYPE

ACTIONS = ("promote", "hold", "resume", "rollback")
PREFIX = "/canary"
OWN_PATHS = frozenset({PREFIX, f"{PREFIX}/", f"{PREFIX}/status", "/metrics", "/health"})

PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                "connect-src 'self'", "cache-control": "no-store"}  # fmt: skip


def is_own(path: str) -> bool:
    """Whether a path is the router's and not a server's."""
    return path in OWN_PATHS or path.startswith(f"{PREFIX}/")


class Control:
    """Answers on the router's own paths.

    Args:
        key: must be shown, as ``Authorization: Bearer KEY``, to change anything.
        status: returns the state as JSON.
        act: does one of :data:`ACTIONS`, and raises :class:`NotNowError` if it makes no sense now.
        metrics: returns Prometheus' text.
    """

    def __init__(
        self, key: str, status: Callable[[], dict[str, Any]], act: Callable[[str], None], metrics: Callable[[], bytes]
    ) -> None:
        self._key = _digest(key)
        self._status = status
        self._act = act
        self._metrics = metrics
        self._page = files("chairlift.canary").joinpath("page.html").read_text(encoding="utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            response = self._answer(scope)
        except APIError as error:
            response = error.response()
        await response(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        method, path = scope["method"], scope["path"]
        action = path.removeprefix(f"{PREFIX}/")
        if action in ACTIONS:
            if method != "POST":
                raise APIError(405, f"{path} takes POST", headers={"allow": "POST"})
            return self._do(scope, action)
        if path not in OWN_PATHS:
            raise APIError(
                404, f"there is no {path[:128]}; there are {PREFIX}, {PREFIX}/status and {', '.join(ACTIONS)}"
            )
        if method not in ("GET", "HEAD"):
            raise APIError(405, f"{path} takes GET", headers={"allow": "GET, HEAD"})
        if path == "/metrics":
            return Response(self._metrics(), media_type=CONTENT_TYPE)
        if path == "/health":
            up = {name: side["up"] for name, side in self._status()["sides"].items()}
            return JSONResponse(
                {"status": "ok" if any(up.values()) else "no server is up", "up": up}, 200 if any(up.values()) else 503
            )
        if path == f"{PREFIX}/status":
            return JSONResponse(self._status(), headers={"cache-control": "no-store"})
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)

    def _do(self, scope: Scope, action: str) -> Response:
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        scheme, _, key = shown.partition(" ")
        # Digests have one length, so the time of the comparison tells nothing about the key.
        if not hmac.compare_digest(_digest(key.strip()), self._key) or scheme.lower() != "bearer":
            raise APIError(
                401, "show the control key as: Authorization: Bearer KEY", headers={"www-authenticate": "Bearer"}
            )
        try:
            self._act(action)
        except NotNowError as error:
            raise APIError(409, str(error)) from error
        return JSONResponse(self._status())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
