"""``GET /openapi.json``: every route, body and error, from the models that check what comes in.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from chairlift import __version__
from chairlift.api.responses import ResponsesBody
from chairlift.api.schema import ChatBody, CompletionBody
from chairlift.api.tokenize import DetokenizeBody, TokenizeBody, TokenizeChatBody
from chairlift.api.unknown import WARNING_HEADER

BODIES = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, TokenizeChatBody, DetokenizeBody)

ERRORS = {
    400: "A field is wrong; the message says which and what to change.",
    401: "The API key is missing or wrong.",
    404: "No such model, or no such path.",
    408: "The body took longer to come than a request may take.",
    413: "The body is larger than the server takes.",
    415: "The body is not said to be JSON.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server is at fault; its log has the cause.",
    503: "The engine cannot answer, or the server shuts down.",
    504: "The answer took longer than a request may take.",
}
READING = (401, 404)
"""Errors of routes without a body."""

Schema = dict[str, Any]


def add_openapi_route(app: FastAPI, served_model_names: Sequence[str]) -> None:
    """Adds ``/openapi.json``."""
    names = tuple(served_model_names)

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return JSONResponse(document(names))


@cache
def document(served_model_names: tuple[str, ...] = ()) -> Schema:
    """The description of the API; of one server where it is told the names that models are served under."""
    _, models = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    bodies = {name: _open(schema) for name, schema in models["$defs"].items()}
    if served_model_names:
        for body in bodies.values():
            if "model" in body.get("properties", {}):
                body["properties"]["model"]["enum"] = list(served_model_names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "chairlift",
            "version": __version__,
            "description": "The OpenAI API, with vLLM's further fields. Fields that are not described here are ignored "
            f"and named in the header {WARNING_HEADER}; those of OpenAI's that ask for what there is not are refused.",
        },
        "paths": _paths(served_model_names),
        "components": {
            "schemas": {**bodies, **_answers()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "--api-key of the server"}},
        },
        "security": [{}, {"key": []}],
    }


def _open(schema: Schema) -> Schema:
    """Without the word that further fields are errors: they are ignored."""
    return {key: value for key, value in schema.items() if key != "additionalProperties" or value is not False}


def _paths(served_model_names: tuple[str, ...]) -> Schema:
    return {
        "/v1/completions": _post("Complete a prompt", _ref(CompletionBody), "Completion", stream=True),
        "/v1/chat/completions": _post("Answer a conversation", _ref(ChatBody), "ChatCompletion", stream=True),
        "/v1/responses": _post("Answer an input", _ref(ResponsesBody), "Response", stream=True),
        "/v1/embeddings": {
            "post": {
                "summary": "Refused: the model generates text",
                "operationId": "embeddings",
                "responses": _errors((400, 401)),
            }
        },
        "/tokenize": _post(
            "Turn a text, or a conversation, into tokens",
            {"anyOf": [_ref(TokenizeBody), _ref(TokenizeChatBody)]},
            "Tokens",
        ),
        "/detokenize": _post("Turn tokens into text", _ref(DetokenizeBody), "Text"),
        "/v1/models": _get("List what is served", "Models"),
        "/v1/models/{name}": _get("Describe what is served under a name", "Model", names=served_model_names),
        "/": _get("Name and version", None),
        "/version": _get("Version", "Version"),
        "/health": _probe("Whether the server is alive"),
        "/ready": _probe("Whether a request that comes now would be taken"),
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus",
                "operationId": "metrics",
                "security": [],
                "responses": {"200": {"description": "Samples.", "content": {"text/plain": {}}}},
            }
        },
        "/openapi.json": _get("This document", None),
    }


def _post(summary: str, body: Schema, answer: str, *, stream: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    if stream:
        content["text/event-stream"] = {}  # if stream is set
    responses = {"200": {"description": "The answer.", "content": content}, **_errors(ERRORS)}
    return {
        "post": {
            "summary": summary,
            "operationId": _operation_id(summary),
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": responses,
        }
    }


def _get(summary: str, answer: str | None, *, names: tuple[str, ...] | None = None) -> Schema:
    schema: Schema = {"type": "object"} if answer is None else {"$ref": f"#/components/schemas/{answer}"}
    content = {"application/json": {"schema": schema}}
    responses = {"200": {"description": "The answer.", "content": content}, **_errors(READING)}
    name = {"type": "string", "enum": list(names)} if names else {"type": "string"}
    parameters = [{"name": "name", "in": "path", "required": True, "schema": name}]
    return {
        "get": {
            "summary": summary,
            "operationId": _operation_id(summary),
            **({} if names is None else {"parameters": parameters}),
            "responses": responses,
        }
    }


def _probe(summary: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/State"}}}
    return {
        "get": {
            "summary": summary,
            "operationId": _operation_id(summary),
            "security": [],
            "responses": {
                "200": {"description": "It is.", "content": content},
                "503": {"description": "It is not.", "content": content},
            },
        }
    }


def _operation_id(summary: str) -> str:
    return "".join(
        character for character in summary.lower().replace(" ", "_") if character.isalnum() or character == "_"
    )


def _errors(statuses: Mapping[int, str] | tuple[int, ...]) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}


def _ref(body: type) -> Schema:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NULLABLE_STRING: Schema = {"type": ["string", "null"]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _answers() -> Schema:
    """What comes back. Fields that are there only if they were asked for are left out."""
    usage = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
    head = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
    ending = {"finish_reason": NULLABLE_STRING, "stop_reason": {"type": ["string", "integer", "null"]}}
    logprobs: Schema = {"type": ["object", "null"]}
    choice = _object(index=INTEGER, text=STRING, logprobs=logprobs, **ending)
    message = _object(role=STRING, content=NULLABLE_STRING)
    chat_choice = _object(index=INTEGER, message=message, logprobs=logprobs, **ending)
    model = _object(id=STRING, object=STRING, created=INTEGER, owned_by=STRING, max_model_len=INTEGER)
    error = _object(message=STRING, type=STRING, param=NULLABLE_STRING, code=NULLABLE_STRING)
    response_usage = _object(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER)
    return {
        "Completion": _object(**head, choices=_list(choice), usage=usage),
        "ChatCompletion": _object(**head, choices=_list(chat_choice), usage=usage),
        "Response": _object(
            id=STRING,
            object=STRING,
            created_at=INTEGER,
            model=STRING,
            status=STRING,
            output=_list({"type": "object"}),
            usage=response_usage,
        ),
        "Tokens": _object(
            count=INTEGER, max_model_len=INTEGER, tokens=_list(INTEGER), token_strs={"type": ["array", "null"]}
        ),
        "Text": _object(prompt=STRING),
        "Model": model,
        "Models": _object(object=STRING, data=_list(model)),
        "Version": _object(version=STRING),
        "State": _object(status=STRING, running=INTEGER, waiting=INTEGER, kv_cache_usage={"type": "number"}),
        "Error": _object(error=error),
    }
