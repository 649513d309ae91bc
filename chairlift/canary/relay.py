"""Passes an answer on to the client: as it is, or only as far as it is sound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from chairlift.canary.attempt import Attempt
from chairlift.canary.client import Client
from chairlift.canary.connection import UpstreamError
from chairlift.canary.request import ClientRequest
from chairlift.canary.sse import BrokenStreamError, EventStream
from chairlift.canary.upstream import Reply

MOST_REFUSAL_BYTES = 1024 * 1024
MOST_HELD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered.

    Attributes:
        status: HTTP status.
        broken: why it was not what the protocol says, if it was not.
        text: of choice 0, if it was to be kept.
        finish_reason: the same.
    """

    status: int
    broken: str | None = None
    text: str | None = None
    finish_reason: str | None = None


class RefusedError(Exception):
    """An answer with an error status, none of which the client has seen."""

    def __init__(self, reply: Reply, body: bytes) -> None:
        super().__init__(f"HTTP {reply.status}: {body[:200].decode(errors='replace')}")
        self.status = reply.status
        self.headers = reply.headers
        self.body = body


async def relay_checked(
    reply: Reply, request: ClientRequest, client: Client, attempt: Attempt, side: str, *, keep_text: bool = False
) -> Answer:
    """Passes on whole, sound events, or a whole, sound JSON object. Nothing goes out before there is something of use.

    The events before the first token (a chat's first one only names the role) wait for it, so that a server that goes
    no further can still be replaced.

    Raises:
        RefusedError: an error status.
        UpstreamError, BrokenStreamError: the answer broke off or is not sound.
    """
    if reply.status >= 400:
        raise RefusedError(reply, await reply.read(MOST_REFUSAL_BYTES))
    if not request.canaried:
        return await relay_as_is(reply, request, client, attempt, side)
    if reply.is_events != request.streams and request.json is not None:
        asked, came = ("a stream", "none") if request.streams else ("one object", "a stream")
        raise UpstreamError(f"the client asked for {asked}, and {came} came")
    if not reply.is_events:
        return await _relay_object(reply, client, attempt, side, keep_text)
    return await _relay_events(reply, client, attempt, side, keep_text)


async def relay_as_is(
    reply: Reply, request: ClientRequest, client: Client, attempt: Attempt, side: str, *, keep_text: bool = False
) -> Answer:
    """Passes on every byte as it comes, and notices on the way whether it is sound.

    Raises:
        UpstreamError: the answer broke off.
    """
    stream = EventStream(keep_text=keep_text) if reply.is_events else None
    kept: list[bytes] = []
    broken: str | None = None

    def note(piece: bytes) -> None:
        nonlocal broken
        now = attempt.heard()
        if stream is None:
            if keep_text:
                kept.append(piece)
            return
        if broken is None:
            try:
                stream.feed(piece)
            except BrokenStreamError as error:
                broken = str(error)
            if stream.has_token:
                attempt.sample.first_token(now)

    def take(piece: bytes) -> bool:
        if not client.has_room:
            return False
        client.write_at_once(piece)
        note(piece)
        return True

    await client.start(reply.status, reply.headers, side)
    while piece := await reply.piece(take):
        note(piece)
        await client.write(piece, attempt.sample)
    if stream is None:
        text, finish_reason = _text_of(b"".join(kept)) if keep_text else (None, None)
        return Answer(reply.status, None, text, finish_reason)
    if broken is None and request.canaried:
        try:
            stream.end()
        except BrokenStreamError as error:
            broken = str(error)
    return Answer(reply.status, broken, "".join(stream.text) if keep_text else None, stream.finish_reason)


async def _relay_events(reply: Reply, client: Client, attempt: Attempt, side: str, keep_text: bool) -> Answer:
    stream = EventStream(keep_text=keep_text)
    held = b""

    def sound(piece: bytes) -> bytes:
        now = attempt.heard()
        events = stream.feed(piece)
        if stream.has_token:
            attempt.sample.first_token(now)
        return events

    def take(piece: bytes) -> bool:
        if not stream.has_token or not client.has_room:
            return False
        if events := sound(piece):
            client.write_at_once(events)
        return True

    async def let_go() -> None:
        if not client.started:
            await client.start(reply.status, _without_length(reply.headers), side)
        await client.write(held, attempt.sample)

    while piece := await reply.piece(take):
        held += sound(piece)
        if held and (stream.has_token or len(held) > MOST_HELD_BYTES):
            await let_go()
            held = b""
    stream.end()
    if held:
        await let_go()
    return Answer(reply.status, None, "".join(stream.text) if keep_text else None, stream.finish_reason)


async def _relay_object(reply: Reply, client: Client, attempt: Attempt, side: str, keep_text: bool) -> Answer:
    body = await reply.read()
    attempt.heard()
    try:
        decoded = from_json(body)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise UpstreamError("the answer is no JSON object")
    text, finish_reason = _text_of(body) if keep_text else (None, None)
    await client.start(reply.status, reply.headers, side)
    await client.write(body, attempt.sample)
    return Answer(reply.status, None, text, finish_reason)


def _without_length(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Of a stream that may end early, with a word about why."""
    return [(name, value) for name, value in headers if name != b"content-length"]


def _text_of(body: bytes) -> tuple[str | None, str | None]:
    """The text and the finish reason of choice 0; ``None`` where there are none, as for embeddings."""
    try:
        choice: Any = from_json(body)["choices"][0]
        message = choice.get("message") or {}
        text = choice["text"] if "text" in choice else message.get("content")
        return (text if isinstance(text, str) else None), choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None, None
