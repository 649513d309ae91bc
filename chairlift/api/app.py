"""The application: routes, and what every answer has in common."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.api.auth import RequireKey
from chairlift.api.chat import create_chat_completion
from chairlift.api.completions import create_completion
from chairlift.api.errors import APIError
from chairlift.api.forms import FormChecker
from chairlift.api.generation import Frontend
from chairlift.api.lifecycle import Admission, Lifecycle
from chairlift.api.observe import CLIENT_CLOSED_REQUEST, REQUEST_ID, Observe
from chairlift.api.openapi import add_openapi_route
from chairlift.api.operations import add_operation_routes
from chairlift.api.paths import BehindPrefix
from chairlift.api.replicas import add_replica_routes
from chairlift.api.responses import create_response
from chairlift.api.tokenize import add_text_routes
from chairlift.api.tracing import SpanWriter
from chairlift.api.unknown import WARNING_HEADER, WarnOfUnknown
from chairlift.cluster.metrics import ReplicaCollector
from chairlift.cluster.router import RoutedEngine
from chairlift.config import ServerConfig
from chairlift.engine.client import AsyncEngineClient
from chairlift.engine.metrics import EngineMetrics, MeteredEngine
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_calls import detect_parser

EXPOSED_HEADERS = (REQUEST_ID, WARNING_HEADER, "retry-after")
"""Headers of an answer that scripts of another origin may read, beside those that the standard lets them."""


def create_app(
    engine: AsyncEngineClient,
    tokenizer: Tokenizer,
    *,
    served_model_names: Sequence[str],
    config: ServerConfig | None = None,
    max_open_sequences: int | None = None,
    lifecycle: Lifecycle | None = None,
    spans: SpanWriter | None = None,
    admin_key: str | None = None,
) -> FastAPI:
    """Returns the application that serves ``engine``, which stays its maker's to close.

    Args:
        engine: a loaded engine.
        tokenizer: of the model that it runs.
        served_model_names: what clients may call the model, at least one; metrics carry the first.
        config: how the server answers; by default as :class:`ServerConfig` has it.
        max_open_sequences: requests that would make more of them unfinished are told to come back later.
        lifecycle: by which the server that runs the application ends its requests.
        spans: writes a trace span for each request.
        admin_key: opens ``POST /scale``, where the engine has replicas.
    """
    config = config or ServerConfig()
    metrics = EngineMetrics(served_model_names[0], engine.capacity.max_model_len)
    frontend = Frontend(
        MeteredEngine(engine, metrics),
        tokenizer,
        metrics,
        tuple(served_model_names),
        config.max_body_size,
        FormChecker(tokenizer, engine.capacity),
        config.tool_call_parser or detect_parser(tokenizer.chat_template.source),
        max_open_sequences,
    )
    lifecycle = lifecycle or Lifecycle(config.request_timeout, max_open_sequences)
    app = FastAPI(
        title="chairlift",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    _add_middleware(app, config, lifecycle, metrics, spans)
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    _add_generation_routes(app, frontend)
    add_operation_routes(app, frontend, lifecycle)
    if isinstance(engine, RoutedEngine):
        metrics.registry.register(ReplicaCollector(engine, served_model_names[0]))
        add_replica_routes(app, engine, admin_key)
    return app


def _add_middleware(
    app: FastAPI, config: ServerConfig, lifecycle: Lifecycle, metrics: EngineMetrics, spans: SpanWriter | None
) -> None:
    """From the innermost to the outermost: a request without a key is refused before it counts as open."""
    app.add_middleware(WarnOfUnknown)
    app.add_middleware(Admission, lifecycle=lifecycle)
    if config.api_keys:
        app.add_middleware(RequireKey, api_keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(Observe, metrics=metrics, log=config.enable_log_requests, spans=spans)
    if config.root_path:
        app.add_middleware(BehindPrefix, prefix=config.root_path)


def _add_generation_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await create_completion(frontend, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(frontend, request)

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        return await create_response(frontend, request)

    add_text_routes(app, frontend)
    add_openapi_route(app, frontend.served_model_names)


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
