"""Streams that come in any pieces: the same events, the same verdict."""

from __future__ import annotations

import contextlib
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


def typed(kind: str, **more: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


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
        (b'data: {"choices": ["x"]}\n\n' + DONE, "no objects"),
        (b'data: {"choices": 5}\n\n' + DONE, "no list"),
        (b'data: {"choices": [{"delta": "x"}]}\n\n' + DONE, "delta is no object"),
        (typed("response.created") + typed("response.failed"), "reported an error"),
        (typed("error", message="boom"), "boom"),
        (typed("response.completed") + typed("response.created"), "after the last"),
        (event() + b"<html>\n\n", "no server-sent event"),
        (event() + b'data: {"error": {"message": "boom"}}\n\n', "boom"),
        (event() + DONE + event(), "after the last"),
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


@pytest.mark.parametrize("last", ["response.completed", "response.incomplete"])
@pytest.mark.parametrize("more", [b"", DONE])
def test_a_response_ends_with_an_event_of_its_own(last: str, more: bytes):
    stream = EventStream()
    stream.feed(typed("response.created", response={"error": None}) + typed("response.output_text.delta", delta=""))
    assert not stream.has_token
    stream.feed(typed("response.output_text.delta", delta="hi"))
    assert stream.has_token
    with pytest.raises(BrokenStreamError):
        stream.end()
    stream.feed(typed(last, response={"error": None}) + more)
    stream.end()


def events_of(values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    names = ("choices", "delta", "text", "content", "tool_calls", "index", "finish_reason", "type", "error", "x")
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | events_of(inner),
    max_leaves=12,
)


@given(st.lists(events_of(json_values), max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_json_comes_it_is_an_event_or_a_broken_stream(events: list[dict[str, object]], keep_text: bool):
    stream = EventStream(keep_text=keep_text)
    with contextlib.suppress(BrokenStreamError):
        for each in events:
            stream.feed(f"data: {json.dumps(each)}\n\n".encode())
        assert all(isinstance(text, str) for text in stream.text)


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
