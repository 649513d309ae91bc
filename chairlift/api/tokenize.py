"""``POST /tokenize`` and ``/detokenize``, with vLLM's bodies, and the refusal of ``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.chat import chat_token_ids
from chairlift.api.errors import APIError
from chairlift.api.fields import Body, Unsupported
from chairlift.api.generation import TEXT_OVERHEAD, Frontend
from chairlift.api.messages import check_tools
from chairlift.api.schema import ChatBody, parse
from chairlift.api.stream import encode_json


class TokenizeBody(Body):
    """A text to be tokenized."""

    model: str | None = Field(None, description="A name that the server serves.")
    prompt: str
    add_special_tokens: bool | None = Field(None, description="Begin with the model's BOS token. Default: true.")
    return_token_strs: bool | None = Field(None, description="Give the text of each token too.")


class TokenizeChatBody(ChatBody):
    """A conversation to be tokenized: the fields of a chat completion, of which only the prompt's matter."""

    unsupported: ClassVar[Unsupported] = ChatBody.unsupported | {"add_special_tokens": (False,)}

    return_token_strs: bool | None = Field(None, description="Give the text of each token too.")


class DetokenizeBody(Body):
    """Tokens to be made text."""

    model: str | None = Field(None, description="A name that the server serves.")
    tokens: Annotated[list[int], Field(fail_fast=True)]


def add_text_routes(app: FastAPI, frontend: Frontend) -> None:
    """Adds routes for which no model has to run."""

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        return await _tokenize(frontend, await read_json(request, frontend.max_body_bytes))

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        return JSONResponse(await _detokenize(frontend, await read_json(request, frontend.max_body_bytes)))

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        raise APIError(
            400,
            "this server runs a model that generates text and has no embeddings; ask one with an embedding model",
            code="unsupported_endpoint",
        )


async def _tokenize(frontend: Frontend, data: object) -> Response:
    body: TokenizeBody | TokenizeChatBody
    if isinstance(data, dict) and "messages" in data:
        # A conversation needs no model's name here, where a chat completion does.
        body = parse(TokenizeChatBody, {"model": frontend.served_model_names[0], **data})
        frontend.check_model(body.model)
        check_tools(frontend, body)
        token_ids = await chat_token_ids(frontend, body)
    else:
        body = parse(TokenizeBody, data)
        if body.model is not None:
            frontend.check_model(body.model)
        [token_ids] = await frontend.encode(
            [body.prompt], "prompt", add_special_tokens=body.add_special_tokens is not False
        )
    text_of = frontend.tokenizer.token_bytes

    def write() -> bytes:
        wanted = token_ids if body.return_token_strs else ()
        strings = [text_of(token_id).decode("utf-8", "replace") for token_id in wanted]
        answer = {
            "count": len(token_ids),
            "max_model_len": frontend.engine.capacity.max_model_len,
            "tokens": token_ids,
            "token_strs": strings if body.return_token_strs else None,
        }
        return encode_json(answer).encode()

    content = await frontend.text_work(write, TEXT_OVERHEAD + len(token_ids), "prompt")
    return Response(content, media_type="application/json")


async def _detokenize(frontend: Frontend, data: object) -> dict[str, Any]:
    body = parse(DetokenizeBody, data)
    if body.model is not None:
        frontend.check_model(body.model)
    frontend.check_tokens(body.tokens, "tokens")
    text = await frontend.text_work(
        lambda: frontend.tokenizer.decode(body.tokens, skip_special_tokens=False),
        TEXT_OVERHEAD + len(body.tokens),
        "tokens",
    )
    return {"prompt": text}
