"""Sessions, the breaker, headers, adapters and the state file, each by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.canary.adapter import AdapterError, GenerateAdapter, as_events, load_adapter, openai_answer
from chairlift.canary.breaker import FIRST_PAUSE, LONGEST_PAUSE, TRIP_AFTER, Breaker
from chairlift.canary.request import ClientRequest, end_to_end
from chairlift.canary.rollout import Rollout
from chairlift.canary.session import SessionRule
from chairlift.canary.state_file import SavedState, load, save
from chairlift.config import ConfigError

# Sessions


def test_a_session_is_the_header_or_the_user_or_the_address():
    rule = SessionRule()
    assert rule.session_of({"x-session-id": " a "}, {"user": "u"}, "1.2.3.4") == "header a"
    assert rule.session_of({"x-session-id": " "}, {"user": "u"}, "1.2.3.4") == "user u"
    for body in ({"user": ""}, {"user": 7}, {}, [], None, "user"):
        assert rule.session_of({"x-forwarded-for": "9.9.9.9"}, body, "1.2.3.4") == "address 1.2.3.4"
    assert SessionRule(header="x-chat").session_of({"x-chat": "c", "x-session-id": "a"}, None, "") == "header c"
    assert SessionRule(fallback="request").session_of({}, None, "1.2.3.4") is None
    trusting = SessionRule(trust_forwarded=True)
    assert trusting.session_of({"x-forwarded-for": "9.9.9.9, 8.8.8.8"}, None, "1.2.3.4") == "address 9.9.9.9"
    assert trusting.session_of({}, None, "1.2.3.4") == "address 1.2.3.4"


# Breaker


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_try():
    breaker = Breaker()
    for _ in range(TRIP_AFTER - 1):
        breaker.failed(0.0, "no")
    breaker.succeeded()
    for _ in range(TRIP_AFTER):
        assert breaker.allow(1.0)
        breaker.failed(1.0, "refused")
    assert breaker.state(1.0) == "open"
    assert not breaker.allow(1.0 + FIRST_PAUSE - 0.01)
    assert breaker.allow(1.0 + FIRST_PAUSE)
    assert not breaker.allow(1.0 + FIRST_PAUSE)  # one at a time
    assert breaker.state(1.0 + FIRST_PAUSE) == "half-open"
    assert breaker.down_for(11.0) == 10.0
    breaker.succeeded()
    assert breaker.state(2.0) == "closed"
    assert breaker.down_for(20.0) == 0.0


def test_pauses_double_up_to_a_limit_and_a_try_that_says_nothing_frees_its_place():
    breaker = Breaker()
    for _ in range(TRIP_AFTER):
        breaker.failed(0.0, "")
    now, pauses = 0.0, []
    for _ in range(8):
        assert breaker.reopens is not None
        pauses.append(breaker.reopens - now)
        now = breaker.reopens
        assert breaker.allow(now)
        breaker.failed(now, "")
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == LONGEST_PAUSE
    now += LONGEST_PAUSE
    assert breaker.allow(now)
    breaker.released()
    assert breaker.allow(now)


# Headers and requests


def test_what_one_hop_agreed_on_stays_behind():
    kept = end_to_end(
        [
            ("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"), ("Keep-Alive", "5"), ("TE", "trailers"),
            ("Transfer-Encoding", "chunked"), ("Upgrade", "h2c"), ("Host", "a"), ("Content-Length", "3"),
            ("Authorization", "Bearer k"), ("X-Two", "1"), ("x-two", "2"),
        ]
    )  # fmt: skip
    assert kept == {"authorization": "Bearer k", "x-two": "1, 2"}


def request(path: str, body: object = None, method: str = "POST") -> ClientRequest:
    return ClientRequest(method, path, path, {}, b"", body if isinstance(body, dict) else None, "", "id")


def test_headers_that_come_twice_are_joined():
    headers = end_to_end([("A", "1"), ("a", "2"), ("Cookie", "x=1"), ("cookie", "y=2")])
    assert headers == {"a": "1, 2", "cookie": "x=1; y=2"}


def test_what_may_be_sent_twice():
    assert request("/v1/chat/completions", {}).repeatable
    assert request("/v1/embeddings", {"store": False}).repeatable
    assert request("/v1/files", method="GET").repeatable
    assert not request("/v1/chat/completions", {"store": True}).repeatable
    assert not request("/v1/responses", {}).repeatable
    assert not request("/v1/files", {}).repeatable
    assert not request("/v1/chat/completions", method="DELETE").repeatable


# Adapters


def test_generate_takes_prompts_and_chats():
    adapter = GenerateAdapter()
    body = {"model": "m", "prompt": "Once", "max_tokens": 5, "temperature": 0, "logprobs": 2, "stream": True, "n": 1}
    assert adapter.request("/v1/completions", body) == (
        "/generate", {"prompt": "Once", "max_tokens": 5, "temperature": 0},
    )  # fmt: skip
    answer = adapter.answer("/v1/completions", body, {"text": "Once upon"})
    assert answer["choices"][0]["text"] == " upon"
    assert answer["object"] == "text_completion"
    assert adapter.answer("/v1/completions", body, {"text": ["new"]})["choices"][0]["text"] == "new"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 7}
    assert adapter.request("/v1/chat/completions", chat) == (
        "/generate", {"prompt": "user: ab\nassistant:", "max_tokens": 7},
    )  # fmt: skip
    message = adapter.answer("/v1/chat/completions", chat, {"text": "user: ab\nassistant: hi"})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": " hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": "hi"}),
        ("/v1/chat/completions", {"messages": ["hi"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}),
    ],
)
def test_what_generate_cannot_take(path: str, body: dict):
    with pytest.raises(AdapterError):
        GenerateAdapter().request(path, body)


@pytest.mark.parametrize("reply", [{}, {"text": 7}, {"text": ["a", "b"]}, {"text": []}, {"text": None}])
def test_what_is_no_answer_of_generate(reply: dict):
    with pytest.raises(AdapterError):
        GenerateAdapter().answer("/v1/completions", {"prompt": "a"}, reply)


def test_an_answer_as_a_stream_of_one_piece():
    events = as_events(openai_answer("/v1/chat/completions", "m", "hi")).split(b"\n\n")
    first = json.loads(events[0].removeprefix(b"data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["content"] == "hi"
    assert "message" not in first["choices"][0]
    assert events[1:] == [b"data: [DONE]", b""]


def test_adapters_are_found_by_name():
    assert isinstance(load_adapter("generate"), GenerateAdapter)
    assert isinstance(load_adapter("chairlift.canary.adapter:GenerateAdapter"), GenerateAdapter)
    for wrong in ("none", "no.such.module:X", "json:loads", "json:JSONDecoder", "chairlift.canary.adapter:Nothing"):
        with pytest.raises(ConfigError, match="--stable-adapter"):
            load_adapter(wrong)


# State

IDENTITY = {"stable": "http://a", "steps": [10.0, 100.0], "gates": ["error_rate<1%"]}


def state() -> SavedState:
    rollout = Rollout((0.1, 1.0), 60.0)
    rollout.start(0.0, 5.0)
    return SavedState(IDENTITY, "running", 1, 17, rollout.events, [("ab", 0.25)])


def test_what_was_saved_is_read_and_nothing_else_is_left(tmp_path: Path):
    path = tmp_path / "state.json"
    assert load(path, IDENTITY, 2) is None
    save(path, state())
    save(path, state())
    assert load(path, IDENTITY, 2) == state()
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state.json"
    save(path, state())

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(path, SavedState(IDENTITY, "held", 0, 1))
    assert load(path, IDENTITY, 2) == state()
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_state_that_is_damaged_or_of_another_rollout_is_refused(tmp_path: Path):
    path = tmp_path / "state.json"
    save(path, state())
    whole = path.read_text()
    damages = {
        whole[: len(whole) // 2]: "damaged",
        whole.replace('"step": 1', '"step": 0'): "checksum",
        whole.replace('"version": 1', '"version": 9'): "version",
        "": "damaged",
        "[]": "damaged",
        "\x00\xff": "no state|cannot be read|damaged",
    }
    for text, said in damages.items():
        assert text != whole
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=said) as error:
            load(path, IDENTITY, 2)
        assert "move it away" in str(error.value)
    path.write_text(whole)
    with pytest.raises(ConfigError, match=r"another rollout \(stable 'http://a'\)"):
        load(path, IDENTITY | {"stable": "http://other"}, 2)
    with pytest.raises(ConfigError, match="a step that there is not"):
        load(path, IDENTITY, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path, IDENTITY, 2)
