"""``POST /v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.errors import bad_request
from chairlift.api.generation import TEXT_OVERHEAD, Frontend, engine_errors, usage, usage_of_choice
from chairlift.api.messages import MessageReader, MessageReaders
from chairlift.api.report import TokenReport, write_logprobs
from chairlift.api.schema import ChatBody, MessageBody, parse
from chairlift.api.stream import DONE, GOES_ON, Answer, EventStream, encode_json, ending_of, unless_disconnected
from chairlift.text.logprobs import prompt_logprobs
from chairlift.text.output import OutputDelta, OutputStream, SequenceText
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_calls import ToolCallDelta


async def create_chat_completion(frontend: Frontend, request: Request) -> Response:
    """Answers one request.

    Raises:
        APIError: what the client is to be told instead.
        ClientDisconnect: the client hung up; nothing of its request is left.
    """
    body = parse(ChatBody, await read_json(request, frontend.max_body_bytes))
    frontend.check_model(body.model)
    readers = MessageReaders(frontend, body)
    await frontend.check_form(body)
    prompt = await chat_token_ids(frontend, body)
    outputs = chat_outputs(frontend, body, prompt, readers)
    answer = Answer("chatcmpl", body.model)
    if body.stream:
        return EventStream(_chunks(outputs, prompt, answer, body, readers, frontend.tokenizer))
    whole = _whole(outputs, prompt, answer, body, readers, frontend.tokenizer)
    return JSONResponse(await unless_disconnected(request.receive, whole))


def chat_outputs(frontend: Frontend, body: ChatBody, prompt: Sequence[int], readers: MessageReaders) -> OutputStream:
    """The sequences that answer a conversation; see :meth:`Frontend.outputs`."""
    if readers.need_special_tokens:
        body = body.model_copy(update={"skip_special_tokens": False})
    return frontend.outputs([prompt], body, max_tokens=body.requested_max_tokens, param="messages")


async def chat_token_ids(frontend: Frontend, body: ChatBody) -> list[int]:
    """The conversation as the model was taught to read it.

    Raises:
        APIError: 400, the model's chat template does not take it.
    """
    messages = [_message(message) for message in body.messages]
    tools = [tool.for_template() for tool in body.tools_in_use]
    generation_prompt = body.add_generation_prompt is not False and not body.continue_final_message

    def render() -> str:
        text = frontend.tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, tools=tools or None, **(body.chat_template_kwargs or {})
        )
        return _up_to_content(text, body.messages[-1].text) if body.continue_final_message else text

    characters = sum(TEXT_OVERHEAD + len(message.get("content") or "") for message in messages)
    text = await frontend.text_work(render, characters + sum(map(_size, tools)), "messages")
    [token_ids] = await frontend.encode([text], "messages", add_special_tokens=False)
    return token_ids


def _size(tool: Any) -> int:
    return len(encode_json(tool))


def _message(message: MessageBody) -> dict[str, Any]:
    """The message as chat templates know it; "developer" is OpenAI's newer word for what they call "system"."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return plain


def _up_to_content(text: str, content: str) -> str:
    """Cuts off what a template wrote behind the last message's content, which it may have stripped."""
    for shown in (content, content.strip()):
        start = text.rfind(shown) if shown else -1
        if start >= 0:
            return text[: start + len(shown)]
    raise bad_request(
        "continue_final_message needs a last message with content that the chat template shows as it is",
        "continue_final_message",
    )


async def _whole(
    outputs: OutputStream,
    prompt: Sequence[int],
    answer: Answer,
    body: ChatBody,
    readers: MessageReaders,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    with engine_errors():
        async with outputs:
            sequences = await outputs.collect()

    def write() -> dict[str, Any]:
        choices = [_whole_choice(sequence, readers, TokenReport(tokenizer, body)) for sequence in sequences]
        fields: dict[str, Any] = {"choices": choices, "usage": usage([prompt], outputs)}
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(tokenizer, sequences[0].prompt_logprobs, body.prompt_logprobs)
        if body.return_token_ids:
            fields["prompt_token_ids"] = list(prompt)
        return answer.head("chat.completion") | fields

    return await write_logprobs(write, sequences)


def _whole_choice(sequence: SequenceText, readers: MessageReaders, report: TokenReport) -> dict[str, Any]:
    reader = readers.new()
    reader.push(sequence.text)
    reader.finish()
    message: dict[str, Any] = {"role": "assistant", "content": reader.content, "refusal": None}
    if reader.calls:
        message |= {"content": reader.content or None, "tool_calls": reader.calls}
    report.add(sequence)
    return {
        "index": sequence.index,
        "message": message,
        **report.take(),
        "finish_reason": reader.finish_reason(sequence.finish_reason),
        "stop_reason": sequence.stop_reason,
    }


async def _chunks(
    outputs: OutputStream,
    prompt: Sequence[int],
    answer: Answer,
    body: ChatBody,
    readers: MessageReaders,
    tokenizer: Tokenizer,
) -> AsyncGenerator[bytes, None]:
    """Each choice begins with a chunk that has the role, sent when its first token is there."""
    events = answer.events("chat.completion.chunk", include_usage=body.include_usage)
    begun: dict[int, MessageReader] = {}
    reports = [TokenReport(tokenizer, body) for _ in range(outputs.num_sequences)]
    with engine_errors():
        async with outputs:
            async for delta in outputs:
                chunk = b""
                report = reports[delta.index]
                so_far = usage_of_choice([prompt], outputs, delta.index) if body.continuous_usage else None
                if delta.index not in begun:
                    begun[delta.index] = readers.new()
                    first = report.begin(prompt)
                    chunk = events.choice(_choice(delta.index, '"role":"assistant","content":""', first), so_far)
                report.add(delta)
                for fields in _deltas(delta, begun[delta.index]):
                    chunk += events.choice(_choice(delta.index, fields, report.take_json()), so_far)
                if delta.finish_reason:
                    ending = ending_of(delta, begun[delta.index].finish_reason(delta.finish_reason))
                    chunk += events.choice(_choice(delta.index, "", report.take_json(), ending), so_far)
                if chunk:
                    yield chunk
    if body.include_usage:
        yield events.usage(usage([prompt], outputs))
    yield DONE


def _deltas(delta: OutputDelta, reader: MessageReader) -> list[str]:
    """The fields of each chunk for what came, as JSON without the braces."""
    pieces = reader.push(delta.text)
    if delta.finish_reason:
        pieces += reader.finish()
    fields = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
            if piece.name is not None:
                identity = {"id": reader.calls[piece.index]["id"], "type": "function"}
                call = {
                    "index": piece.index,
                    **identity,
                    "function": {"name": piece.name, "arguments": piece.arguments},
                }
            fields.append(f'"tool_calls":[{encode_json(call)}]')
        else:
            fields.append(f'"content":{encode_json(piece)}')
    return fields


def _choice(index: int, delta: str, report: str, ending: str = GOES_ON) -> str:
    return f'"index":{index},"delta":{{{delta}}},{report},{ending}'
