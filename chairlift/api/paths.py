"""Paths: those for whoever runs the server, and the prefix that a proxy shows it under."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Open without a key, answered to the very end, and outside of every limit."""
CONTROLS = frozenset({"/replicas", "/scale"})
"""For operators, who need them most when the server is full: they take no place that a request waits for."""


def path_of(scope: Scope) -> str:
    """The path behind the prefix (``--root-path``)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class BehindPrefix:
    """Middleware: has the application answer under ``prefix``, whether the proxy in front has taken that off or not.

    In ASGI a path has the prefix in front: https://asgi.readthedocs.io/en/latest/specs/www.html
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its whole path."""
        if scope["type"] == "http":
            scope["root_path"] = self._prefix
            if not scope["path"].startswith(f"{self._prefix}/"):
                scope["path"] = self._prefix + scope["path"]
        await self._app(scope, receive, send)
