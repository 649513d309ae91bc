"""Streams that come in any pieces: the same events, the same verdict."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.canary.sse import MOST_EVENT_BYTES, BrokenStreamError, EventStream

DONE = b"data: [DONE]\n\n"


def event(text: str = "hi", end: str = "\n\n", **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice], **more}, ensure_ascii=False)}{end}".encode()


def fed(data: bytes, cuts: list[int]) -> tuple[bytes, EventStream]:
    """Feeds ``data`` cut at ``cuts``; whatever comes out ends where an event ends."""
    stream = EventStream(keep_text=True)
    out = b""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        out += stream.feed(data[start:end])
        assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))
    return out, stream


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6)
cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(texts, cuts, st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_cutting_gives_every_byte_and_the_text(pieces: list[str], at: list[int], end: str, comments: bool):
    comment = b": ping\n\nevent: message\nid: 7\nretry: 3\n" if comments else b""
    data = b"".join(comment + event(piece, end) for piece in pieces) + f"data: [DONE]{end}".encode()
    out, stream = fed(data, at)
    stream.end()
    assert out == data
    assert "".join(stream.text) == "".join(pieces)
    assert stream.has_token == any(pieces)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (event() + b'data: {"choices": [\n\n' + DONE, "not JSON"),
        (event() + b"data: 7\n\n" + DONE, "no JSON object"),
        (event() + b'data: {"choices": ["x"]}\n\n' + DONE, "no objects"),
        (event() + b"<html>\n\n", "no server-sent event"),
        (event() + b'data: {"error": {"message": "boom"}}\n\n', "boom"),
        (event() + DONE + event(), "after [DONE]"),
        (event() + b"data: \xff\xfe\n\n" + DONE, "not JSON"),
    ],
)
@given(at=cuts)
@settings(max_examples=20, deadline=None)
def test_what_no_client_could_read_is_told_and_not_handed_on(data: bytes, said: str, at: list[int]):
    with pytest.raises(BrokenStreamError) as error:
        fed(data, at)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [(event(), r"without \[DONE\]"), (b"", r"without \[DONE\]"), (event() + b'data: {"cho', "middle of an event")],
)
def test_an_end_that_comes_too_early(data: bytes, said: str):
    _, stream = fed(data, [])
    with pytest.raises(BrokenStreamError, match=said):
        stream.end()


def test_an_event_without_an_end_does_not_fill_the_memory():
    stream = EventStream()
    assert stream.feed(b"x" * MOST_EVENT_BYTES) == b""
    with pytest.raises(BrokenStreamError, match="more than"):
        stream.feed(b"x")


@pytest.mark.parametrize(
    ("delta", "has_token"),
    [
        ({"role": "assistant"}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"content": "a"}, True),
        ({"reasoning_content": "a"}, True),
        ({"tool_calls": [{"index": 0}]}, True),
        ({"content": None}, False),
    ],
)
def test_what_is_a_first_token(delta: dict, has_token: bool):
    stream = EventStream()
    stream.feed(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode())
    assert stream.has_token == has_token
    stream.feed(b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n')
    assert stream.has_token == has_token
