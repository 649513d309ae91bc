"""``POST /v1/completions``: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.generation import Frontend, engine_errors, usage
from chairlift.api.schema import COMPLETION_MAX_TOKENS, CompletionBody, parse
from chairlift.api.stream import DONE, Answer, EventStream, encode_json, ending_of, unless_disconnected
from chairlift.text.output import OutputStream


async def create_completion(frontend: Frontend, request: Request) -> Response:
    """Answers one request; the choices of prompt p are ``p * n`` to ``p * n + n - 1``.

    Raises:
        APIError: what the client is to be told instead.
        ClientDisconnect: the client hung up; nothing of its request is left.
    """
    body = parse(CompletionBody, await read_json(request, frontend.max_body_bytes))
    frontend.check_model(body.model)
    frontend.check_choices(len(body.prompt), body, "prompt")
    await frontend.check_form(body)
    prompts = await _token_ids(frontend, body)
    max_tokens = body.requested_max_tokens or COMPLETION_MAX_TOKENS
    outputs = frontend.outputs(prompts, body, max_tokens=max_tokens, param="prompt")
    answer = Answer("cmpl", body.model)
    if body.stream:
        return EventStream(_chunks(outputs, prompts, answer, body.include_usage))
    return JSONResponse(await unless_disconnected(request.receive, _whole(outputs, prompts, answer)))


async def _token_ids(frontend: Frontend, body: CompletionBody) -> list[list[int]]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in body.prompt if not isinstance(prompt, str)]
    return await frontend.encode(texts, "prompt", add_special_tokens=body.add_special_tokens is not False)


async def _whole(outputs: OutputStream, prompts: Sequence[Sequence[int]], answer: Answer) -> dict[str, Any]:
    with engine_errors():
        async with outputs:
            sequences = await outputs.collect()
    choices = [
        {
            "index": sequence.index,
            "text": sequence.text,
            "logprobs": None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        for sequence in sequences
    ]
    return answer.head("text_completion") | {"choices": choices, "usage": usage(prompts, outputs)}


async def _chunks(
    outputs: OutputStream, prompts: Sequence[Sequence[int]], answer: Answer, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    events = answer.events("text_completion", include_usage=include_usage)
    with engine_errors():
        async with outputs:
            async for delta in outputs:
                if delta.text or delta.finish_reason:
                    yield events.choice(
                        f'"index":{delta.index},"text":{encode_json(delta.text)},"logprobs":null,{ending_of(delta)}'
                    )
    if include_usage:
        yield events.usage(usage(prompts, outputs))
    yield DONE
