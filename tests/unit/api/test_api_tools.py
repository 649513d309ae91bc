"""Forms and tools over HTTP, with an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from chairlift.api.app import create_app
from chairlift.engine.executor import Capacity
from chairlift.scheduling.sampling_params import StructuredSpec
from chairlift.text.chat_template import ChatTemplate

pytestmark = pytest.mark.anyio

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def tool_app(engine: Any, make_tokenizer: Callable[[], Any]) -> FastAPI:
    engine.capacity = Capacity(num_blocks=512, block_size=16, max_model_len=4096, vocab_size=258, model="tiny")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ChatTemplate({"default": TOOL_TEMPLATE})
    return create_app(engine, tokenizer, served_model_names=["tiny"])


@pytest.fixture
async def tool_client(tool_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(tool_app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=(ASK if "chat" in path else {}) | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt_of(engine: Any) -> str:
    return bytes(engine.asked[-1][0]).decode()


async def test_tools_are_rendered_and_calls_come_back(tool_client: httpx.AsyncClient, engine: Any):
    engine.reply = f"Let me see. {CALL}".encode()
    choice = (await chat(tool_client, tools=[WEATHER]))["choices"][0]
    assert '"name": "weather"' in prompt_of(engine)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Paris"}'})


async def test_no_tools_no_calls(tool_client: httpx.AsyncClient, engine: Any):
    engine.reply = CALL.encode()
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = (await chat(tool_client, **fields))["choices"][0]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert "<tools>" not in prompt_of(engine)


async def test_only_one_call_where_they_must_not_be_parallel(tool_client: httpx.AsyncClient, engine: Any):
    engine.reply = (CALL * 2).encode()
    assert len((await chat(tool_client, tools=[WEATHER]))["choices"][0]["message"]["tool_calls"]) == 2
    one = await chat(tool_client, tools=[WEATHER], parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


async def test_forced_calls_ask_the_engine_for_their_form(tool_client: httpx.AsyncClient, engine: Any):
    engine.reply = b'[{"name": "weather", "parameters": {"city": "Oslo"}}]'
    choice = (await chat(tool_client, tools=[WEATHER], tool_choice="required"))["choices"][0]
    assert engine.asked[-1][1].structured.kind == "json_schema"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    engine.reply = b'{"city": "Oslo"}'
    named = {"type": "function", "function": {"name": "weather"}}
    choice = (await chat(tool_client, tools=[WEATHER], tool_choice=named))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


async def test_a_call_that_is_cut_short_says_so(tool_client: httpx.AsyncClient, engine: Any):
    engine.reply = CALL.encode()
    choice = (await chat(tool_client, tools=[WEATHER], max_tokens=len(CALL) - 17))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


async def test_the_conversation_goes_on_with_the_results(tool_client: httpx.AsyncClient, engine: Any):
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    await chat(tool_client, messages=messages, tools=[WEATHER])
    assert prompt_of(engine).endswith(
        '<assistant><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        "<tool>sunny#call_1<assistant>"
    )
    called["function"]["arguments"] = "no JSON"
    assert "arguments" in (await refusal(tool_client, messages=messages))["message"]


async def test_models_without_tools_refuse_them_by_name(client: httpx.AsyncClient):
    assert (await refusal(client, tools=[WEATHER]))["param"] == "tools"
    called = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [called]}]
    assert (await refusal(client, messages=messages))["param"] == "messages[1].tool_calls"


async def test_a_template_whose_calls_are_unknown_takes_forced_calls_alone(
    tool_client: httpx.AsyncClient, engine: Any, make_tokenizer: Callable[[], Any]
):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ChatTemplate({"default": "{{ tools }}{{ messages }}"})
    transport = httpx.ASGITransport(create_app(engine, tokenizer, served_model_names=["tiny"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert "--tool-call-parser" in (await refusal(http, tools=[WEATHER]))["message"]
        forced = ASK | {"tools": [WEATHER], "tool_choice": "required"}
        assert (await http.post("/v1/chat/completions", json=forced)).is_success


async def test_streamed_calls_add_up_in_the_client(
    tool_app: FastAPI, engine: Any, live: Callable[[Any], AbstractAsyncContextManager[str]]
):
    engine.reply = f"Well.\n{CALL}\n{CALL}".encode()
    async with (
        live(tool_app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as api,
        api.chat.completions.stream(**ASK, tools=[WEATHER]) as stream,
    ):
        pieces = [event.arguments_delta async for event in stream if event.type.endswith("arguments.delta")]
        message = (await stream.get_final_completion()).choices[0]
    assert len(pieces) > 10
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "Well."
    calls = message.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", '{"city": "Paris"}')] * 2
    assert len({call.id for call in calls}) == 2


async def test_forms_reach_the_engine(tool_client: httpx.AsyncClient, engine: Any):
    await chat(tool_client, response_format={"type": "json_object"})
    assert engine.asked[-1][1].structured == StructuredSpec("json_object")
    response = await tool_client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "structured_outputs": {"regex": "[ab]"}}
    )
    assert response.is_success
    assert engine.asked[-1][1].structured == StructuredSpec("regex", "[ab]")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "GBNF"),
        ({"guided_json": {"type": "objct"}}, "guided_json", "objct"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", '"not"'),
        ({"guided_json": {"not": {}, "x-guidance": {"lenient": True}}}, "guided_json", '"not"'),
        ({"guided_json": {"type": "string", "description": "x" * 200_000}}, "guided_json", "characters"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
            "response_format",
            "nowhere",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objct"}}}],
                "tool_choice": "required",
            },
            "tools",
            "objct",
        ),
    ],
)
async def test_a_form_that_cannot_be_followed_is_refused_and_why(
    tool_client: httpx.AsyncClient, engine: Any, fields: dict[str, Any], param: str, reason: str
):
    error = await refusal(tool_client, **fields)
    assert (error["param"], error["code"]) == (param, "invalid_form")
    assert reason in error["message"]
    assert len(error["message"]) < 700
    assert "\n" not in error["message"]
    assert engine.asked == []


async def test_the_final_message_is_continued(tool_client: httpx.AsyncClient, engine: Any):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It was "}]
    await chat(tool_client, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt_of(engine) == "<user>x<assistant>It was "
    messages[1]["content"] = ""
    error = await refusal(tool_client, messages=messages, continue_final_message=True)
    assert error["param"] == "continue_final_message"
