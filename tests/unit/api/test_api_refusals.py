"""Whatever a client sends, it gets a 4xx that says what to change, and the next good request works."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from chairlift.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
}
PATHS = list(GOOD)


async def refused(client: httpx.AsyncClient, status: int, path: str, **request: Any) -> dict[str, Any]:
    """Sends a bad request, checks the form of the error, then that a good one is answered. Returns the error."""
    response = await client.post(path, **request)
    assert response.status_code == status, response.text
    error = openai_error(response)
    good = await client.post("/v1/completions", json=GOOD["/v1/completions"])
    assert good.status_code == 200
    assert good.json()["choices"][0]["text"] == "Hello world"
    return error


def openai_error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body: dict[str, dict[str, Any]] = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
    assert error["message"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"nonsense", b'{"model": "tiny",}', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}',
        b"[" * 50_000, b'{"a":' * 10_000, b'{"n":' + b"9" * 50_000 + b"}", b'{"model": "\\ud800"}',
        b'{"model": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
async def test_malformed_json(client: httpx.AsyncClient, path: str, content: bytes) -> None:
    error = await refused(client, 400, path, content=content, headers=JSON)
    assert error["code"] == "invalid_json"
    assert error["message"].startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("path", PATHS)
async def test_json_that_is_no_object(client: httpx.AsyncClient, path: str) -> None:
    for content in (b"null", b"[]", b"5", b'"text"', b"[" * 150 + b"]" * 150):
        error = await refused(client, 400, path, content=content, headers=JSON)
        assert "JSON object" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "é"])
async def test_another_content_type(client: httpx.AsyncClient, path: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type.encode()}
    error = await refused(client, 415, path, content=json.dumps(GOOD[path]), headers=headers)
    assert "application/json" in error["message"]


async def test_json_with_a_charset_is_json(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await client.post(PATHS[0], content=json.dumps(GOOD[PATHS[0]]), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_too_large(client: httpx.AsyncClient, path: str) -> None:
    content = json.dumps(GOOD[path] | {"user": "x" * 100_000}).encode()
    error = await refused(client, 413, path, content=content, headers=JSON)
    assert "100000 bytes" in error["message"]


async def test_a_large_body_of_unknown_length_is_not_read_to_its_end(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    await refused(client, 413, PATHS[0], content=endless(), headers=JSON)
    assert sent == 110_000


async def test_a_body_of_just_the_limit(client: httpx.AsyncClient) -> None:
    content = json.dumps(GOOD[PATHS[0]]).encode().ljust(100_000)
    assert (await client.post(PATHS[0], content=content, headers=JSON)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    error = await refused(client, 404, path, json=GOOD[path] | {"model": "huge"})
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "the model 'huge' does not exist; served here: tiny, org/tiny"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 2**80), ("temperature", -1),
        ("temperature", 2.5), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("n", 0), ("n", 1000), ("stop", ""),
        ("stop", [""]), ("stop", 5), ("seed", "x"), ("seed", 2**64), ("stream", "yes"), ("stop_token_ids", [-1]),
        ("stop_token_ids", [300]), ("stop_token_ids", [2**80]), ("logit_bias", {"1": 101}),
        ("logit_bias", {"300": 1}), ("logit_bias", {"99999999999": 1}), ("logprobs", 21), ("logprobs", "all"),
        ("presence_penalty", 2.1), ("frequency_penalty", -3), ("repetition_penalty", 0), ("min_tokens", -1),
        ("top_k", -2), ("prompt_logprobs", 21), ("store", True),
        ("min_p", 2), ("stream_options", {"include_usage": True}), ("model", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [{}, {"stream": True}])
async def test_bad_fields(client: httpx.AsyncClient, path: str, field: str, value: Any, stream: dict[str, Any]) -> None:
    if field == "stream_options" and stream:
        value = {"include_usage": "yes"}
    body = GOOD[path] | stream | {field: value}
    error = await refused(client, 400, path, json=body)
    assert field in error["message"] or error["param"] == field


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], ["a", ""], [[]], [[1], []], 5, {}, [None], [True], [1.5], [1, "a"], ["a", 1], [["a"]],
     [-1], [300], [2**80], [[1], [300]], [[[1]]]],
)  # fmt: skip
async def test_bad_prompts(client: httpx.AsyncClient, prompt: Any) -> None:
    error = await refused(client, 400, PATHS[0], json={"model": "tiny", "prompt": prompt})
    assert error["param"] == "prompt"


async def test_a_token_id_out_of_range_is_named(client: httpx.AsyncClient) -> None:
    error = await refused(client, 400, PATHS[0], json={"model": "tiny", "prompt": [1, 300, 2]})
    assert error["message"] == "300 is no token id; they are from 0 to 299"
    edges = await client.post(PATHS[0], json={"model": "tiny", "prompt": [0, 299]})
    assert edges.status_code == 200


async def test_too_many_choices(client: httpx.AsyncClient) -> None:
    error = await refused(client, 400, PATHS[0], json={"model": "tiny", "prompt": [[1]] * 17, "n": 128})
    assert "2176" in error["message"]


async def test_too_many_choices_are_refused_before_any_is_tokenized(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    response = await client.post(PATHS[0], json={"model": "tiny", "prompt": ["a"] * 2049})
    assert response.status_code == 400
    assert "2049 choices" in openai_error(response)["message"]


@pytest.mark.parametrize(("count", "characters"), [(4, 3000), (1000, 1)])
async def test_many_prompts_are_tokenized_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, count: int, characters: int
) -> None:
    threads: set[int] = set()

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.get_ident())
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    body = {"model": "tiny", "prompt": ["a" * characters] * count, "max_tokens": 1}
    assert (await client.post(PATHS[0], json=body)).status_code == 200
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "Hi", ["Hi"], [{}], [{"role": "pilot", "content": "x"}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]],
)  # fmt: skip
async def test_bad_messages(client: httpx.AsyncClient, messages: Any) -> None:
    error = await refused(client, 400, PATHS[1], json={"model": "tiny", "messages": messages})
    assert error["param"].startswith("messages")


async def test_variables_of_the_template_that_are_not_the_clients(client: httpx.AsyncClient) -> None:
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        body = GOOD[PATHS[1]] | {"chat_template_kwargs": {name: 5}}
        error = await refused(client, 400, PATHS[1], json=body)
        assert error["param"] == "chat_template_kwargs"
        assert name in error["message"]


async def test_messages_that_the_template_refuses(client: httpx.AsyncClient) -> None:
    error = await refused(client, 400, PATHS[1], json=GOOD[PATHS[1]] | {"chat_template_kwargs": {"refuse": "not so"}})
    assert error["param"] == "messages"
    assert "not so" in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_of_the_models_length_leaves_no_room(client: httpx.AsyncClient, path: str) -> None:
    template = 18 if path == PATHS[1] else 0
    for letters in (128 - template, 5000):
        text = "a" * letters
        long = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
        error = await refused(client, 400, path, json=GOOD[path] | long)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == PATHS[0] else "messages")
        assert re.search(rf"limit is 128 .* {letters + template} .* {letters + template + 1};", error["message"])


async def test_max_tokens_must_fit_behind_the_prompt(client: httpx.AsyncClient, engine: Any) -> None:
    error = await refused(client, 400, PATHS[0], json={"model": "tiny", "prompt": "a" * 100, "max_tokens": 29})
    assert error["code"] == "context_length_exceeded"
    assert "the prompt's 100 and max_tokens = 29 make 129" in error["message"]
    fits = await client.post(PATHS[0], json={"model": "tiny", "prompt": "a" * 100, "max_tokens": 28})
    assert fits.status_code == 200
    error = await refused(client, 400, PATHS[1], json=GOOD[PATHS[1]] | {"max_completion_tokens": 109})
    assert error["code"] == "context_length_exceeded"


async def test_without_max_tokens_the_rest_of_the_length_will_do(client: httpx.AsyncClient) -> None:
    response = await client.post(PATHS[0], json={"model": "tiny", "prompt": "a" * 124})
    assert response.json()["choices"][0] | {"stop_reason": None} == {
        "index": 0, "text": "Hell", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


async def test_nothing_refused_reaches_the_engine(client: httpx.AsyncClient, engine: Any) -> None:
    for body in ({"prompt": "a" * 500}, {"prompt": ["a", ""]}, {"temperature": 9}, {"stop_token_ids": [999]}):
        assert (await client.post(PATHS[0], json=GOOD[PATHS[0]] | body)).status_code == 400
    assert engine.asked == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", PATHS[0]), ("DELETE", PATHS[1]), ("POST", "/v1/models"), ("PUT", "/health")]
)
async def test_a_method_that_a_path_does_not_take(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] in ("GET", "POST")
    assert path in openai_error(response)["message"]


@pytest.mark.parametrize("path", ["/v1", "/v1/complete", "/v1/model/x", "/completions", "/" + "x" * 5000])
async def test_an_unknown_path(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        response = await client.request(method, path)
        assert response.status_code == 404
        assert len(openai_error(response)["message"]) < 300
