"""Fields that a client sends and the API does not know: named in a header of the answer and in the log, not dropped.

A client that is newer than the server, or speaks another engine's dialect, is served all the same; one that misspelt a
field can see so.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

WARNING_HEADER = "x-chairlift-warning"
MAX_NAMES = 8
MAX_NAME_CHARACTERS = 64
MAX_LOGGED = 1024
"""Names that are remembered as logged; a client that invents more is logged no further."""

_UNFIT = re.compile(r"[^\w.\[\]-]", re.ASCII)
_logged: set[str] = set()
_current: ContextVar[UnknownFields | None] = ContextVar("unknown_fields", default=None)


class UnknownFields:
    """Those of one request."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._count = 0

    def add(self, name: str, place: str, known: tuple[str, ...]) -> None:
        """Takes one; see :func:`note_unknown`."""
        self._count += 1
        if len(self._names) < MAX_NAMES:
            close = _closest(name, known)
            self._names.append(_shown(name, place) + (f" (did you mean {close}?)" if close else ""))

    @property
    def warning(self) -> str | None:
        """What the header says: printable ASCII, within bounds whatever the client called its fields."""
        if not self._names:
            return None
        more = self._count - len(self._names)
        return f"ignored unknown fields: {', '.join(self._names)}{f' and {more} more' if more else ''}"


def note_unknown(name: str, place: str, known: tuple[str, ...]) -> None:
    """Says that a field of the request at hand is not known.

    Args:
        name: as the client wrote it.
        place: of the object that it stands in, within the body; empty for the body itself.
        known: the fields that are known there.
    """
    name = name[:MAX_NAME_CHARACTERS]
    shown = _shown(name, place)
    if shown not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(shown)
        logger.warning("ignored the unknown field %s of a request; the next ones of this name are not logged", shown)
    fields = _current.get()
    if fields is not None:
        fields.add(name, place, known)


@lru_cache(maxsize=256)  # it takes a millisecond, and a client sends the same fields again and again
def _closest(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(get_close_matches(name, known, n=1)), None)


def _shown(name: str, place: str) -> str:
    return (f"{place}." if place else "") + _UNFIT.sub("?", name)


class WarnOfUnknown:
    """Middleware that puts the warning into the head of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fields = UnknownFields()
        token = _current.set(fields)

        async def send_warned(message: Message) -> None:
            if message["type"] == "http.response.start" and (warning := fields.warning) is not None:
                MutableHeaders(scope=message)[WARNING_HEADER] = warning
            await send(message)

        try:
            await self._app(scope, receive, send_warned)
        finally:
            _current.reset(token)
