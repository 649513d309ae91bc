"""``POST /v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.generation import TEXT_OVERHEAD, Frontend, engine_errors, usage
from chairlift.api.schema import ChatBody, MessageBody, parse
from chairlift.api.stream import DONE, GOES_ON, Answer, EventStream, encode_json, ending_of, unless_disconnected
from chairlift.text.output import OutputStream


async def create_chat_completion(frontend: Frontend, request: Request) -> Response:
    """Answers one request.

    Raises:
        APIError: what the client is to be told instead.
        ClientDisconnect: the client hung up; nothing of its request is left.
    """
    body = parse(ChatBody, await read_json(request, frontend.max_body_bytes))
    frontend.check_model(body.model)
    prompt = await _token_ids(frontend, body)
    outputs = frontend.outputs([prompt], body, max_tokens=body.requested_max_tokens, param="messages")
    answer = Answer("chatcmpl", body.model)
    if body.stream:
        return EventStream(_chunks(outputs, prompt, answer, body.include_usage))
    return JSONResponse(await unless_disconnected(request.receive, _whole(outputs, prompt, answer)))


async def _token_ids(frontend: Frontend, body: ChatBody) -> list[int]:
    messages = [_message(message) for message in body.messages]
    generation_prompt = body.add_generation_prompt is not False

    def render() -> str:
        return frontend.tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, **(body.chat_template_kwargs or {})
        )

    characters = sum(TEXT_OVERHEAD + len(message["content"]) for message in messages)
    text = await frontend.text_work(render, characters, "messages")
    [token_ids] = await frontend.encode([text], "messages", add_special_tokens=False)
    return token_ids


def _message(message: MessageBody) -> dict[str, str]:
    """The message as chat templates know it; "developer" is OpenAI's newer word for what they call "system"."""
    plain = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    return plain | ({"tool_call_id": message.tool_call_id} if message.tool_call_id is not None else {})


async def _whole(outputs: OutputStream, prompt: Sequence[int], answer: Answer) -> dict[str, Any]:
    with engine_errors():
        async with outputs:
            sequences = await outputs.collect()
    choices = [
        {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        for sequence in sequences
    ]
    return answer.head("chat.completion") | {"choices": choices, "usage": usage([prompt], outputs)}


async def _chunks(
    outputs: OutputStream, prompt: Sequence[int], answer: Answer, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Each choice begins with a chunk that has the role, sent when its first token is there."""
    events = answer.events("chat.completion.chunk", include_usage=include_usage)
    begun: set[int] = set()
    with engine_errors():
        async with outputs:
            async for delta in outputs:
                chunk = b""
                if delta.index not in begun:
                    begun.add(delta.index)
                    chunk = events.choice(_choice(delta.index, '"role":"assistant","content":""'))
                if delta.text:
                    chunk += events.choice(_choice(delta.index, f'"content":{encode_json(delta.text)}'))
                if delta.finish_reason:
                    chunk += events.choice(_choice(delta.index, "", ending_of(delta)))
                if chunk:
                    yield chunk
    if include_usage:
        yield events.usage(usage([prompt], outputs))
    yield DONE


def _choice(index: int, delta: str, ending: str = GOES_ON) -> str:
    return f'"index":{index},"delta":{{{delta}}},"logprobs":null,{ending}'
