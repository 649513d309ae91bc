"""Logprobs, echoes, choices and warnings in answers, over the ASGI interface."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from chairlift.api import unknown
from chairlift.scheduling.plan import SequenceDelta, TokenLogprob

pytestmark = pytest.mark.anyio
COMPLETION = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
END = 256


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def complete(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = (await post(client, "/v1/completions", COMPLETION | fields))["choices"]
    return choices


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await post(client, "/v1/chat/completions", CHAT | fields)


async def chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(pieces: list[dict[str, list[Any]] | None]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for piece in pieces if piece for value in piece[name]] for name in names}


async def streamed(client: httpx.AsyncClient, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a streamed completion, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in await chunks(client, "/v1/completions", COMPLETION | fields):
        [piece] = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"text": "", "logprobs": []})
        choice["text"] += piece["text"]
        choice["logprobs"].append(piece["logprobs"])
        choice["finish_reason"] = piece["finish_reason"]
    for choice in choices.values():
        choice["logprobs"] = joined(choice["logprobs"])
    return choices


async def test_logprobs_of_a_completion(client: httpx.AsyncClient) -> None:
    [choice] = await complete(client, logprobs=2, max_tokens=3)
    assert choice["logprobs"] == {
        "tokens": ["H", "e", "l"],
        "token_logprobs": [0.0, -1.0, -2.0],
        "top_logprobs": [{"H": 0.0, "I": -1.0}, {"e": -1.0, "f": -2.0}, {"l": -2.0, "m": -3.0}],
        "text_offset": [0, 1, 2],
    }
    [choice] = await complete(client, max_tokens=3)
    assert choice["logprobs"] is None


async def test_a_stream_has_the_same_logprobs(client: httpx.AsyncClient, engine: Any) -> None:
    engine.reply = "é🙂!".encode()
    for fields in ({}, {"echo": True}, {"echo": True, "prompt": ["Hé", "x"], "n": 2}, {"echo": True, "max_tokens": 0}):
        whole = await complete(client, logprobs=1, **fields)
        pieces = await streamed(client, logprobs=1, **fields)
        assert sorted(pieces) == [choice["index"] for choice in whole]
        for choice in whole:
            for name in ("text", "logprobs", "finish_reason"):
                assert pieces[choice["index"]][name] == choice[name]


async def test_an_echo_with_logprobs(client: httpx.AsyncClient, engine: Any) -> None:
    [choice] = await complete(client, echo=True, logprobs=1, max_tokens=1)
    assert choice["text"] == "HiH"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "H"],
        "token_logprobs": [None, -1.0, 0.0],
        "top_logprobs": [None, {"i": -1.0}, {"H": 0.0}],
        "text_offset": [0, 1, 2],
    }
    assert engine.asked[-1][1].prompt_logprobs == 1


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_an_echo_alone(client: httpx.AsyncClient, engine: Any, logprobs: int | None) -> None:
    answer = await post(
        client, "/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0, "logprobs": logprobs, "prompt": "é"}
    )
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("é", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.asked[-1][1].max_tokens == 0
    expected = {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"bytes:\\xa9": -1.0}],
        "text_offset": [0, 0],
    }
    assert choice["logprobs"] == (None if logprobs is None else expected)


async def test_an_echo_of_tokens_ends_the_character_that_they_leave_open(
    client: httpx.AsyncClient, engine: Any
) -> None:
    engine.reply = b"\xa9!"
    [choice] = await complete(client, echo=True, prompt=[72, 0xC3], logprobs=0)
    assert choice["text"] == "Hé!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]
    assert (await streamed(client, echo=True, prompt=[72, 0xC3], logprobs=0))[0]["text"] == "Hé!"


async def test_bytes_that_are_no_text_have_logprobs_like_any_other(client: httpx.AsyncClient, engine: Any) -> None:
    """Pitfall 13."""
    engine.reply = b"a\xff\xf0\x9f"
    [choice] = await complete(client, logprobs=1, echo=True, prompt=[0xFF, 0x80])
    assert choice["text"] == "\ufffd\ufffda\ufffd\ufffd"
    tokens = ["bytes:\\xff", "bytes:\\x80", "a", "bytes:\\xff", "bytes:\\xf0", "bytes:\\x9f", "</s>"]
    assert choice["logprobs"]["tokens"] == tokens
    answer = await chat(client, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [255], [240], [159], [*b"</s>"]]
    assert [entry["token"] for entry in content] == ["a", "\\xff", "\\xf0", "\\x9f", "</s>"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5


async def test_logprobs_of_chat_whole_and_streamed(client: httpx.AsyncClient, engine: Any) -> None:
    engine.reply = "é🙂!".encode()
    whole = (await chat(client, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in whole] == [-float(i) for i in range(8)]
    pieces = []
    for chunk in await chunks(client, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}):
        [choice] = chunk["choices"]
        if choice["logprobs"] is not None:
            pieces += choice["logprobs"]["content"]
    assert pieces == whole
    assert (await chat(client))["choices"][0]["logprobs"] is None


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    expected = [None, {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}}]
    [choice] = await complete(client, prompt_logprobs=0, max_tokens=0)
    assert (choice["prompt_logprobs"], choice["text"], choice["logprobs"]) == (expected, "", None)
    answer = await chat(client, prompt_logprobs=1, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in await chat(client)


async def test_token_ids(client: httpx.AsyncClient) -> None:
    [choice] = await complete(client, return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([72, 105], [*b"Hello world", END])
    answer = await chat(client, return_token_ids=True)
    assert answer["prompt_token_ids"] == [257, *b"user:Hi", 256, 257, *b"assistant:"]
    assert answer["choices"][0]["token_ids"] == [*b"Hello world", END]
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        told = [c for chunk in await chunks(client, path, body | {"return_token_ids": True}) for c in chunk["choices"]]
        assert [i for choice in told for i in choice.get("token_ids") or ()] == [*b"Hello world", END]
        assert told[0]["prompt_token_ids"][-1] == (105 if path == "/v1/completions" else ord(":"))


async def test_the_best_of_several_are_given_likeliest_first(client: httpx.AsyncClient, engine: Any) -> None:
    replies = iter([b"aaaa", b"b", b"ccc", b"dd", b"ee", b"f"])

    async def scripted(_prompt: Any, params: Any, **_options: Any) -> AsyncIterator[SequenceDelta]:
        """The longer an answer, the less likely are its tokens."""
        assert params.logprobs == 0
        reply = next(replies)
        logprobs = [TokenLogprob(token, -float(len(reply)), 1) for token in reply]
        yield SequenceDelta("0", tuple(reply), "length", logprobs=logprobs)

    engine.generate = scripted
    body = COMPLETION | {"n": 2, "best_of": 3, "prompt": ["x", "y"]}
    answer = await post(client, "/v1/completions", body)
    assert [choice["text"] for choice in answer["choices"]] == ["b", "ccc", "f", "dd"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == (4 + 1 + 3) + (2 + 2 + 1)


async def test_usage_that_goes_with_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body, prompt in (("/v1/completions", COMPLETION, 2), ("/v1/chat/completions", CHAT, 20)):
        *told, last = await chunks(client, path, body | options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in told]
        assert counts == sorted(counts)
        assert set(counts) == set(range(1, 13))
        assert {chunk["usage"]["prompt_tokens"] for chunk in told} == {prompt}
        assert all(c["usage"]["total_tokens"] == c["usage"]["completion_tokens"] + prompt for c in told)
        assert last["usage"]["completion_tokens"] == 12
    *told, _ = await chunks(client, "/v1/completions", COMPLETION | {"prompt": ["a", "bcd"]} | options)
    assert {(chunk["choices"][0]["index"], chunk["usage"]["prompt_tokens"]) for chunk in told} == {(0, 1), (1, 3)}


async def test_what_ended_the_text_can_be_kept(client: httpx.AsyncClient) -> None:
    for stop in ("lo w", "o"):
        [choice] = await complete(client, stop=stop, include_stop_str_in_output=True)
        assert choice["text"] == "Hello world"[: "Hello world".index(stop) + len(stop)]
    assert (await streamed(client, stop="lo w", include_stop_str_in_output=True))[0]["text"] == "Hello w"
    [choice] = await complete(client, skip_special_tokens=False, include_stop_str_in_output=True)
    assert choice["text"] == "Hello world</s>"


# ---- fields that are not known ----

HEADER = "x-chairlift-warning"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_an_unknown_field_is_named_in_a_header(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    response = await client.post(path, json=body | {"stream": stream, "max_token": 5, "zzz": {"a": 1}})
    assert response.status_code == 200
    assert response.headers[HEADER] == "ignored unknown fields: max_token (did you mean max_tokens?), zzz"
    response = await client.post(path, json=body | {"stream": stream})
    assert HEADER not in response.headers


async def test_where_it_stands_is_told(client: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "colour": 1}], "contents": 5}
    body = {"model": "tiny", "messages": [message], "stream": True, "stream_options": {"include_use": True}}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.headers[HEADER] == (
        "ignored unknown fields: stream_options.include_use (did you mean include_usage?), "
        "messages[].contents (did you mean content?), messages[].content[].colour"
    )


async def test_a_refusal_names_them_too(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=COMPLETION | {"promt": "x", "n": 0})
    assert response.status_code == 400
    assert "promt" in response.headers[HEADER]


async def test_the_header_is_sane_and_bounded_whatever_fields_are_called(client: httpx.AsyncClient) -> None:
    names = ["a\r\nX-Evil: 1", "é" * 500, "\x00", "x" * 10_000, *(f"k{i}" for i in range(2000))]
    response = await client.post("/v1/completions", json=COMPLETION | dict.fromkeys(names, 1))
    assert response.status_code == 200
    warning = response.headers[HEADER]
    assert len(warning) < 1000
    assert warning.isascii()
    assert warning.isprintable()
    assert warning.endswith(f" and {len(names) - unknown.MAX_NAMES} more")
    assert "x-evil" not in response.headers


async def test_the_log_names_a_field_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_logged", set())
    monkeypatch.setattr(unknown, "MAX_LOGGED", 2)
    caplog.set_level(logging.WARNING, logger=unknown.__name__)
    for fields in ({"colour": 1}, {"colour": 2, "a\nb": 1}, {"third": 1}):
        await client.post("/v1/completions", json=COMPLETION | fields)
    assert [record.args for record in caplog.records] == [("colour",), ("a?b",)]
