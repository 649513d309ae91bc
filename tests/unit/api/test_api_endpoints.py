"""Endpoints beside completions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from chairlift.scheduling.sampling_params import StructuredSpec

pytestmark = pytest.mark.anyio

NOT: dict[str, Any] = {"not": {}}
ASK = {"model": "tiny", "input": "hi"}


async def post(client: httpx.AsyncClient, path: str, body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def text_of(token_ids: list[int]) -> str:
    """A dot for each special token."""
    return "".join(chr(token) if token < 256 else "·" for token in token_ids)


async def test_a_text_becomes_tokens_and_text_again(client: httpx.AsyncClient):
    text = "Grüße"
    tokens = await post(client, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert tokens["tokens"] == list(text.encode())
    assert (tokens["count"], tokens["max_model_len"]) == (7, 128)
    assert tokens["token_strs"][:2] == ["G", "r"]
    assert (await post(client, "/detokenize", {"model": "tiny", "tokens": tokens["tokens"]})) == {"prompt": text}
    assert (await post(client, "/tokenize", {"model": "tiny", "prompt": ""}))["tokens"] == []


async def test_a_conversation_becomes_the_tokens_of_its_prompt(client: httpx.AsyncClient, engine: Any):
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await post(client, "/tokenize", {"messages": messages}))["tokens"]
    await post(client, "/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert tokens == engine.asked[0][0]
    plain = await post(client, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert plain["count"] < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, 400, None),
        ("/v1/responses", {}, 400, "model"),
        ("/v1/responses", ASK | {"model": "other"}, 404, "model"),
        ("/v1/responses", ASK | {"input": []}, 400, "input"),
        ("/v1/responses", ASK | {"input": [{"type": "reasoning"}]}, 400, "input[0].type"),
        ("/v1/responses", ASK | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, None),
        ("/v1/responses", ASK | {"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ("/v1/responses", ASK | {"store": True}, 400, "store"),
        ("/v1/responses", ASK | {"tools": [{"type": "web_search"}]}, 400, "tools"),
        ("/v1/responses", ASK | {"max_output_tokens": 0}, 400, "max_output_tokens"),
        ("/v1/responses", ASK | {"input": "x" * 500}, 400, "input"),
        ("/v1/responses", ASK | {"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        (
            "/v1/responses",
            ASK | {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            400,
            "text.format",
        ),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, path: str, body: Any, status: int, param: str | None):
    error = await refused(client, path, body, status)
    if param is not None:
        assert error["param"] == param
    assert error["message"]


async def test_a_response(client: httpx.AsyncClient, engine: Any):
    body = ASK | {"instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 20}
    response = await post(client, "/v1/responses", body)
    assert text_of(engine.asked[0][0]) == "·system:Be brief.··user:hi··assistant:"
    assert (engine.asked[0][1].temperature, engine.asked[0][1].max_tokens) == (0.5, 20)
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "Hello world"
    assert response["usage"] == {
        "input_tokens": len(engine.asked[0][0]),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(engine.asked[0][0]) + 12,
    }


async def test_a_conversation_goes_on_by_its_items(client: httpx.AsyncClient, engine: Any):
    first = await post(client, "/v1/responses", ASK)
    items = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "more"}]
    cut = await post(client, "/v1/responses", ASK | {"input": items, "max_output_tokens": 3})
    assert "·assistant:Hello world··user:more·" in text_of(engine.asked[1][0])
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["content"][0]["text"] == "Hel"


async def test_the_form_of_a_response(client: httpx.AsyncClient, engine: Any):
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}, "strict": True}}
    response = await post(client, "/v1/responses", ASK | {"text": form})
    assert engine.asked[0][1].structured == StructuredSpec("json_schema", '{"type":"integer"}')
    assert response["text"]["format"]["schema"] == {"type": "integer"}


@pytest.mark.parametrize(("limit", "end"), [(None, "response.completed"), (3, "response.incomplete")])
async def test_a_streamed_response_adds_up_in_the_client(
    app: FastAPI, live: Callable[[Any], AbstractAsyncContextManager[str]], limit: int | None, end: str
):
    async with (
        live(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as api,
    ):
        stream = await api.responses.create(**ASK, max_output_tokens=limit, stream=True)
        events = [event async for event in stream]
        whole = await api.responses.create(**ASK, max_output_tokens=limit)
    kinds = [event.type.removeprefix("response.") for event in events]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", end.removeprefix("response.")]
    assert kinds[:4] == head
    assert kinds[-4:] == tail
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == whole.output_text == "Hello world"[:limit]
    assert (final.status, final.usage) == (whole.status, whole.usage)


async def test_a_stream_accumulates_in_the_clients_own_helper(
    app: FastAPI, live: Callable[[Any], AbstractAsyncContextManager[str]]
):
    async with (
        live(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as api,
        api.responses.stream(**ASK) as stream,
    ):
        response = await stream.get_final_response()
    assert response.output_text == "Hello world"
