"""The application: routes, and what every answer has in common."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift import __version__
from chairlift.api.chat import create_chat_completion
from chairlift.api.completions import create_completion
from chairlift.api.errors import APIError
from chairlift.api.generation import Frontend
from chairlift.engine.client import AsyncEngineClient
from chairlift.engine.metrics import CONTENT_TYPE, EngineMetrics, MeteredEngine
from chairlift.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024**2
REQUEST_ID = "x-request-id"
SANE_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody waits for; it is never sent, but logs show it."""


def create_app(
    engine: AsyncEngineClient,
    tokenizer: Tokenizer,
    *,
    served_model_names: Sequence[str],
    max_body_bytes: int = MAX_BODY_BYTES,
    max_open_sequences: int | None = None,
) -> FastAPI:
    """Returns the application that serves ``engine``, which stays its maker's to close.

    Args:
        engine: a loaded engine.
        tokenizer: of the model that it runs.
        served_model_names: what clients may call the model, at least one; metrics carry the first.
        max_body_bytes: larger request bodies are refused.
        max_open_sequences: requests that would make more of them unfinished are told to come back later.
    """
    metrics = EngineMetrics(served_model_names[0], engine.capacity.max_model_len)
    frontend = Frontend(
        MeteredEngine(engine, metrics),
        tokenizer,
        metrics,
        tuple(served_model_names),
        max_body_bytes,
        max_open_sequences,
    )
    app = FastAPI(
        title="chairlift",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(_RequestIds)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    _add_generation_routes(app, frontend)
    _add_operation_routes(app, frontend)
    return app


def _add_generation_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await create_completion(frontend, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(frontend, request)


def _add_operation_routes(app: FastAPI, frontend: Frontend) -> None:
    engine, metrics = frontend.engine, frontend.metrics
    created = int(time.time())

    @app.get("/", response_model=None)
    async def root() -> Response:
        return JSONResponse({"name": "chairlift", "version": __version__, "models": frontend.served_model_names})

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        listed = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "chairlift",
                "root": engine.capacity.model,
                "parent": None,
                "max_model_len": engine.capacity.max_model_len,
            }
            for name in frontend.served_model_names
        ]
        return JSONResponse({"object": "list", "data": listed})

    @app.get("/health", response_model=None)
    async def health() -> Response:
        stats = engine.stats()
        status = "dead" if not stats.alive else "wedged" if stats.wedged else "ok"
        state = {
            "status": status,
            "last_step_age_s": round(stats.last_step_age, 3),
            "running": stats.running,
            "waiting": stats.waiting,
            "swapped": stats.swapped,
            "kv_cache_usage": round(stats.kv_cache_usage, 4),
        }
        return JSONResponse(state, 200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        return Response(metrics.render(engine.stats()), media_type=CONTENT_TYPE)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})


class _RequestIds:
    """Answers with the client's ``X-Request-Id``, if it can be written to a log as it is, or else with one of its own.

    Only a label: the engine's ids are its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = next((value for name, value in scope["headers"] if name == REQUEST_ID.encode()), b"").decode(
            "latin-1"
        )
        request_id = offered if SANE_REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_labelled)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)  # noqa: S101 - registered for it
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own refusals: no such path, or a method that the path does not take."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    message = {
        404: f"there is no {request.url.path[:128]}; the API's paths begin with /v1",
        405: f"{request.url.path[:128]} does not take {request.method[:16]}",
    }.get(error.status_code, error.detail)
    return APIError(error.status_code, message).response(error.headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, _error: Exception) -> Response:
    """An exception that nothing foresaw. The server logs it after this answer, which tells the client no internals."""
    headers = {REQUEST_ID: request.scope[REQUEST_ID]}
    return APIError(500, "internal error; the server's log has the cause").response(headers)
