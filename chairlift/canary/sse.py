"""Server-sent events as they pass: whether they are what the OpenAI API promises, and when the first token comes.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

MOST_EVENT_BYTES = 4 * 1024 * 1024
ENDS = (b"\n\n", b"\r\n\r\n")
FIELDS = (b"event:", b"id:", b"retry:", b":")
LAST_OF_RESPONSE = ("response.completed", "response.incomplete")
"""Types of the events with which a stream of ``/v1/responses`` ends, where others have ``[DONE]``."""
FAILURES = ("response.failed", "error")


class BrokenStreamError(Exception):
    """The stream is not what its protocol says."""


class EventStream:
    """Cuts a stream into whole events and checks each.

    A part of an event is held back until the rest is there, as no client could use it, so that what has been handed on
    always ends where an event ends.

    Attributes:
        done: ``[DONE]`` has come, or the last event of a response.
        has_token: some event had text, a tool call or reasoning in it.
        text: what a client would show, of choice 0, if ``keep_text``.
        finish_reason: of choice 0, if ``keep_text``.
    """

    def __init__(self, *, keep_text: bool = False) -> None:
        self.done = False
        self.has_token = False
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self._keep_text = keep_text
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes what has come and returns the whole events of it, unchanged.

        Raises:
            BrokenStreamError: an event that no client could read, that reports an error, or that has no end.
        """
        data = self._rest + data if self._rest else data
        end = len(data)
        if not data.endswith(ENDS):
            end = max((data.rfind(mark) + len(mark) for mark in ENDS if mark in data), default=0)
        whole, self._rest = data[:end], data[end:]
        if len(self._rest) > MOST_EVENT_BYTES:
            raise BrokenStreamError(f"an event has more than {MOST_EVENT_BYTES} bytes")
        for event in _data_of(whole):
            self._check(event)
        return whole

    def end(self) -> None:
        """The stream has ended.

        Raises:
            BrokenStreamError: too early.
        """
        if self._rest.strip():
            raise BrokenStreamError("the stream ended in the middle of an event")
        if not self.done:
            raise BrokenStreamError("the stream ended without [DONE] or the last event of a response")

    def _check(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        if self.done:
            raise BrokenStreamError("an event after the last one")
        try:
            event = from_json(data, cache_strings=False)
        except ValueError:
            raise BrokenStreamError(f"an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise BrokenStreamError(f"an event that is no JSON object: {data[:80]!r}")
        kind = event.get("type")
        if event.get("error") or kind in FAILURES:
            raise BrokenStreamError(
                f"the server reported an error in its stream: {data[:200].decode(errors='replace')}"
            )
        self.done = kind in LAST_OF_RESPONSE
        if not self.has_token or self._keep_text:
            self._read(event)
            self.has_token |= isinstance(kind, str) and kind.endswith(".delta") and bool(event.get("delta"))

    def _read(self, event: dict[str, Any]) -> None:
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise BrokenStreamError("an event whose choices are no list")
        for choice in choices:
            if not isinstance(choice, dict):
                raise BrokenStreamError("an event whose choices are no objects")
            delta = choice.get("delta") or {}
            if not isinstance(delta, dict):
                raise BrokenStreamError("an event whose delta is no object")
            text = choice.get("text") or delta.get("content") or ""
            other = delta.get("tool_calls") or delta.get("reasoning_content") or delta.get("reasoning")
            self.has_token |= bool(text or other)
            if self._keep_text and choice.get("index", 0) == 0:
                self.text.append(text if isinstance(text, str) else "")
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _data_of(events: bytes) -> Iterator[bytes]:
    """The data of each of several whole events."""
    data: list[bytes] = []
    for line in events.split(b"\n"):
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line:
            if data:
                yield b"\n".join(data)
                data = []
        elif not line.startswith(FIELDS):
            raise BrokenStreamError(f"a line that is no server-sent event: {line[:80]!r}")
