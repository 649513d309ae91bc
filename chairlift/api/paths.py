"""Paths that are for whoever runs the server, and not for its clients."""

from __future__ import annotations

from starlette.types import Scope

PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Open without a key, answered to the very end, and outside of every limit."""


def path_of(scope: Scope) -> str:
    """The path without the prefix that a proxy may have left in front of it (``--root-path``)."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(f"{prefix}/") else path
