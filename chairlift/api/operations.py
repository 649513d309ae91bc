"""What the server tells about itself: for probes, for Prometheus, and for clients that ask what is served."""

from __future__ import annotations

import math
import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from chairlift import __version__
from chairlift.api.errors import RETRY_AFTER_SECONDS
from chairlift.api.generation import Frontend
from chairlift.api.lifecycle import Lifecycle
from chairlift.engine.client import EngineStats
from chairlift.engine.metrics import CONTENT_TYPE


def add_operation_routes(app: FastAPI, frontend: Frontend, lifecycle: Lifecycle) -> None:
    """Adds ``/``, ``/v1/models``, ``/version``, and those of :data:`~chairlift.api.paths.PROBES`."""
    _add_model_routes(app, frontend)
    engine, metrics = frontend.engine, frontend.metrics

    @app.get("/", response_model=None)
    async def root() -> Response:
        return JSONResponse({"name": "chairlift", "version": __version__, "models": frontend.served_model_names})

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether this process is alive: it is while it can mend what is wrong by itself."""
        state = _state(engine.stats(), lifecycle)
        return JSONResponse(state, 503 if state["status"] in ("dead", "wedged") else 200)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Whether a request that comes now would be taken."""
        stats = engine.stats()
        state = _state(stats, lifecycle)
        if state["status"] == "ok":
            return JSONResponse(state)
        wait = RETRY_AFTER_SECONDS if stats.retry_after is None else str(max(1, math.ceil(stats.retry_after)))
        return JSONResponse(state, 503, {"Retry-After": wait})

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        return Response(metrics.render(engine.stats(), engine.capacity), media_type=CONTENT_TYPE)


def _add_model_routes(app: FastAPI, frontend: Frontend) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "chairlift",
            "root": frontend.engine.capacity.model,
            "parent": None,
            "max_model_len": frontend.engine.capacity.max_model_len,
        }

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in frontend.served_model_names]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        frontend.check_model(name)
        return JSONResponse(card(name))


def _state(stats: EngineStats, lifecycle: Lifecycle) -> dict[str, Any]:
    """The state of the server and its engine.

    ``status`` is "ok"; "draining", when the server shuts down; "restarting", when another engine is on its way;
    "wedged", when a step does not end; "dead", when the engine is gone for good.
    """
    if not stats.alive:
        status = "dead" if stats.retry_after is None else "restarting"
    else:
        status = "wedged" if stats.wedged else "ok"
    state = {
        "status": "draining" if lifecycle.draining else status,
        "last_step_age_s": round(stats.last_step_age, 3),
        "running": stats.running,
        "waiting": stats.waiting,
        "swapped": stats.swapped,
        "kv_cache_usage": round(stats.kv_cache_usage, 4),
        "open_requests": len(lifecycle.open),
        "engine_restarts": stats.restarts,
    }
    return state | ({"last_failure": stats.last_failure} if stats.last_failure is not None else {})
