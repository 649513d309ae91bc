"""``POST /v1/responses``: text in and out, whole or streamed. https://platform.openai.com/docs/api-reference/responses

A response is made of a chat completion: the input becomes messages, the instructions the first of them. Nothing is
stored, so one response cannot refer to another.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.chat import chat_outputs, chat_token_ids
from chairlift.api.errors import APIError
from chairlift.api.fields import Body, Unsupported
from chairlift.api.generation import Frontend, engine_errors
from chairlift.api.messages import MessageReaders
from chairlift.api.schema import ChatBody, parse
from chairlift.api.stream import EventStream, encode_json, unless_disconnected
from chairlift.text.output import OutputStream

OWN_NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}


class InputPart(Body):
    """A piece of an input message."""

    place = "input[].content[]"
    ignored = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text"]
    text: str


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class InputMessage(Body):
    """A message of the input, or of an earlier response's output."""

    place = "input[]"
    ignored = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[InputPart],
        Field(fail_fast=True),
        BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart]),
    ]


class TextFormat(Body):
    """The form of the text, as ``response_format`` of a chat completion, with less nesting."""

    place = "text.format"
    ignored = frozenset({"name", "description"})

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="Only with the type json_schema.")
    strict: bool | None = Field(None, description="The answer keeps to the schema whether this is set or not.")


class TextBody(Body):
    """How the text should be."""

    place = "text"
    unsupported: ClassVar[Unsupported] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


def _as_messages(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(Body):
    """The body of ``POST /v1/responses``."""

    unsupported: ClassVar[Unsupported] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({},),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    ignored = frozenset(
        {
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "user",
        }
    )

    model: str = Field(description="A name that the server serves; GET /v1/models lists them.")
    input: Annotated[
        list[InputMessage],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_as_messages, json_schema_input_type=str | list[InputMessage]),
    ] = Field(description="A text, or the conversation so far.")
    instructions: str | None = Field(None, description="What the model is told before the input.")
    max_output_tokens: int | None = Field(None, ge=1, description="The most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="As for chat completions.")
    top_p: float | None = Field(None, gt=0, le=1, description="As for chat completions.")
    stream: bool | None = Field(None, description="Send events while the text is generated.")
    text: TextBody | None = Field(None, description="The form of the text.")

    def chat_body(self) -> ChatBody:
        """The chat completion that gives the same text.

        Raises:
            APIError: 400, about a field that both have.
        """
        messages = [{"role": item.role, "content": "".join(part.text for part in item.content)} for item in self.input]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        chosen = {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._response_format(),
        }
        return parse(ChatBody, {"model": self.model, "messages": messages, **chosen})

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None:
            return None
        schema = {"json_schema": {"schema": form.json_schema}} if form.json_schema is not None else {}
        return {"type": form.type, **schema}


async def create_response(frontend: Frontend, request: Request) -> Response:
    """Answers one request.

    Raises:
        APIError: what the client is to be told instead.
        ClientDisconnect: the client hung up; nothing of its request is left.
    """
    body = parse(ResponsesBody, await read_json(request, frontend.max_body_bytes))
    frontend.check_model(body.model)
    with _own_names():
        chat = body.chat_body()
        await frontend.check_form(chat)
        prompt = await chat_token_ids(frontend, chat)
        outputs = chat_outputs(frontend, chat, prompt, MessageReaders(frontend, chat))
    answer = _Answer(body, prompt)
    if body.stream:
        return EventStream(_events(outputs, answer))
    return JSONResponse(await unless_disconnected(request.receive, _whole(outputs, answer)))


@contextmanager
def _own_names() -> Iterator[None]:
    """What is wrong with a field of the chat completion is told of the field that it came from."""
    try:
        yield
    except APIError as error:
        field, dot, rest = (error.param or "").partition(".")
        error.param = OWN_NAMES.get(field, field) + (dot + rest if field == "messages" else "") or None
        raise


class _Answer:
    """The response object, in each of its states."""

    def __init__(self, body: ResponsesBody, prompt: Sequence[int]) -> None:
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._num_prompt_tokens = len(prompt)
        form = body.text.format if body.text is not None else None
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": body.model,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def begun(self) -> dict[str, Any]:
        """The response before its text."""
        return self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}

    def ended(self, text: str, finish_reason: str | None, outputs: OutputStream) -> dict[str, Any]:
        """The response with its text."""
        cut = finish_reason == "length"
        usage = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": outputs.cached_tokens},
            "output_tokens": outputs.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt_tokens + outputs.completion_tokens,
        }
        return self._head | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(text, "incomplete" if cut else "completed")],
            "usage": usage,
        }

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        """The message; without content where there is no text."""
        content = [] if text is None else [text_part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    """A piece of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _whole(outputs: OutputStream, answer: _Answer) -> dict[str, Any]:
    with engine_errors():
        async with outputs:
            [sequence] = await outputs.collect()
    return answer.ended(sequence.text, sequence.finish_reason, outputs)


class _Events:
    """Writes events, each with its number."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        data = {"type": f"response.{kind}", "sequence_number": self._count, **fields}
        self._count += 1
        return f"event: response.{kind}\ndata: {encode_json(data)}\n\n".encode()


async def _events(outputs: OutputStream, answer: _Answer) -> AsyncGenerator[bytes, None]:
    """The stream's events in the API's order: the response, its one message, that message's one text, and back out."""
    event = _Events()
    texts: list[str] = []
    place = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
    finish_reason = None
    begun = False
    with engine_errors():
        async with outputs:
            async for delta in outputs:
                chunk = b""
                if not begun:
                    begun = True
                    chunk = event("created", response=answer.begun()) + event("in_progress", response=answer.begun())
                    chunk += event("output_item.added", output_index=0, item=answer.item(None, "in_progress"))
                    chunk += event("content_part.added", **place, part=text_part(""))
                if delta.text:
                    texts.append(delta.text)
                    chunk += event("output_text.delta", **place, delta=delta.text, logprobs=[])
                finish_reason = delta.finish_reason or finish_reason
                if chunk:
                    yield chunk
    text = "".join(texts)
    response = answer.ended(text, finish_reason, outputs)
    yield (
        event("output_text.done", **place, text=text, logprobs=[])
        + event("content_part.done", **place, part=text_part(text))
        + event("output_item.done", output_index=0, item=response["output"][0])
        + event(response["status"], response=response)
    )
