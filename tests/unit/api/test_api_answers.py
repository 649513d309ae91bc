"""What a well-formed request gets, over the ASGI interface."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must be whole and end with [DONE]."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def test_completion(client: httpx.AsyncClient, engine: Any) -> None:
    answer = await post(client, "/v1/completions", {"model": "tiny", "prompt": "Hi"})
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 12,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    [(prompt, params, priority)] = engine.asked
    assert (prompt, params.max_tokens, params.temperature, priority) == ([72, 105], 16, 1.0, 0)


async def test_chat(client: httpx.AsyncClient, engine: Any) -> None:
    answer = await post(client, "/v1/chat/completions", HI | {"model": "org/tiny", "priority": -3})
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    prompt = [257, *b"user:Hi", 256, 257, *b"assistant:"]
    assert answer == {
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 12,
            "total_tokens": len(prompt) + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    [(asked, params, priority)] = engine.asked
    assert (asked, params.max_tokens, priority) == (prompt, None, -3)


async def test_chat_template_options(client: httpx.AsyncClient, engine: Any) -> None:
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"suffix": "!"}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    await post(client, "/v1/chat/completions", HI | options | {"messages": messages})
    assert engine.asked[0][0] == [257, *b"system:ab", 256, *b"!"]


async def test_length_is_the_reason_when_max_tokens_end_it(client: httpx.AsyncClient) -> None:
    for path, body in (("/v1/completions", {"model": "tiny", "prompt": "Hi"}), ("/v1/chat/completions", HI)):
        answer = await post(client, path, body | {"max_tokens": 5})
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert (choice.get("text") or choice["message"]["content"]) == "Hello"
        assert answer["usage"]["completion_tokens"] == 5
    answer = await post(client, "/v1/chat/completions", HI | {"max_tokens": 5, "max_completion_tokens": 4})
    assert answer["choices"][0]["message"]["content"] == "Hell"


async def test_each_prompt_gets_its_n_choices_in_order(client: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "tiny", "prompt": ["a", "bc"], "n": 2, "seed": 5}
    answer = await post(client, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 48,
        "total_tokens": 51,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [prompt for prompt, _, _ in engine.asked] == [[97], [97], [98, 99], [98, 99]]
    seeds = [params.seed for _, params, _ in engine.asked]
    assert seeds[0] == seeds[2] == 5
    assert seeds[1] == seeds[3] != 5


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [("A", [[65]]), (["A", "B"], [[65], [66]]), ([65, 66], [[65, 66]]), ([[65], [66, 67]], [[65], [66, 67]])],
)
async def test_every_form_of_a_prompt(client: httpx.AsyncClient, engine: Any, prompt: Any, asked: Any) -> None:
    answer = await post(client, "/v1/completions", {"model": "tiny", "prompt": prompt})
    assert [tokens for tokens, _, _ in engine.asked] == asked
    assert len(answer["choices"]) == len(asked)


async def test_a_long_text_is_tokenized_all_the_same(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a" * 50_000})
    assert response.status_code == 400
    assert "50000" in response.json()["error"]["message"]


async def test_stop_string_across_tokens(client: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "tiny", "prompt": "Hi", "stop": ["lo w", "zzz"]}
    answer = await post(client, "/v1/completions", body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hel", "stop", "lo w")
    assert answer["usage"]["completion_tokens"] == 7
    chunks = await events(client, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hel"
    assert chunks[-1]["choices"][0]["stop_reason"] == "lo w"
    assert engine.ends == ["abort", "abort"]
    assert engine.running == 0


async def test_completion_stream(client: httpx.AsyncClient) -> None:
    chunks = await events(client, "/v1/completions", {"model": "tiny", "prompt": "Hi"})
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("cmpl-")
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("text_completion", "tiny")}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["text"] for choice in choices] == [*"Hello world", ""]
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    chunks = await events(client, "/v1/chat/completions", HI)
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "tiny")}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": letter} for letter in "Hello world"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_in_a_stream(client: httpx.AsyncClient, n: int) -> None:
    body = HI | {"n": n, "stream_options": {"include_usage": True}}
    *chunks, last = await events(client, "/v1/chat/completions", body)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 12 * n,
        "total_tokens": 20 + 12 * n,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_of_several_choices(client: httpx.AsyncClient, path: str) -> None:
    body = {"prompt": ["a", "b"], "model": "tiny"} if path == "/v1/completions" else HI | {"n": 2}
    texts, reasons = ["", ""], [None, None]
    for chunk in await events(client, path, body):
        [choice] = chunk["choices"]
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["Hello world"] * 2
    assert reasons == ["stop", "stop"]


async def test_text_of_any_kind_survives_json_and_events(client: httpx.AsyncClient, engine: Any) -> None:
    text = 'é世界🙂"\\\n\n\r\x00\u2028data: x\t</s>'
    engine.reply = text.encode()
    chunks = await events(client, "/v1/completions", {"model": "tiny", "prompt": "\x00", "max_tokens": 100})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    answer = await post(client, "/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 100})
    assert answer["choices"][0]["text"] == text


async def test_bytes_that_are_no_text_become_replacement_characters(client: httpx.AsyncClient, engine: Any) -> None:
    engine.reply = b"a\xff\xf0\x9f"
    answer = await post(client, "/v1/completions", {"model": "tiny", "prompt": "Hi"})
    assert answer["choices"][0]["text"] == "a\ufffd\ufffd"


async def test_the_model_name_is_echoed_as_json(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/v1/completions", {"model": "org/tiny", "prompt": "a"}))["model"] == "org/tiny"


async def test_ids_differ(client: httpx.AsyncClient) -> None:
    ids = {(await post(client, "/v1/completions", {"model": "tiny", "prompt": "a"}))["id"] for _ in range(3)}
    assert len(ids) == 3
