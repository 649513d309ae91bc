"""What operators ask of a server with replicas: how they are, and to have more or fewer of them."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.errors import APIError, bad_request, shown
from chairlift.cluster.replica import Replica
from chairlift.cluster.router import RoutedEngine
from chairlift.config import ConfigError

ADMIN_KEY = "x-admin-key"
"""Header with the key for changes. The API's own keys are for clients, who are not to take replicas away."""
MAX_BODY_BYTES = 1024


def add_replica_routes(app: FastAPI, engine: RoutedEngine, admin_key: str | None) -> None:
    """Adds ``GET /replicas`` and ``POST /scale``."""

    @app.get("/replicas", response_model=None)
    async def replicas() -> Response:
        return JSONResponse(_state(engine))

    @app.post("/scale", response_model=None)
    async def scale(request: Request) -> Response:
        _check_key(request, admin_key)
        body = await read_json(request, MAX_BODY_BYTES)
        count = body.get("replicas") if isinstance(body, dict) and set(body) == {"replicas"} else None
        if not isinstance(count, int) or isinstance(count, bool):
            raise bad_request(f'the body must be {{"replicas": N}} with a whole number; got {shown(body)}', "replicas")
        try:
            await engine.scale(count)
        except ConfigError as error:
            raise bad_request(str(error), "replicas", code="no_room") from None
        return JSONResponse(_state(engine), 202)


def _check_key(request: Request, admin_key: str | None) -> None:
    """Raises a 403 :class:`APIError` unless the request shows the key. Comparing takes equally long for all keys."""
    if admin_key is None:
        raise APIError(403, "this server is not to be scaled: it was started without --admin-key", code="no_admin_key")
    given = request.headers.get(ADMIN_KEY, "").encode("latin-1")
    if not hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(admin_key.encode()).digest()):
        raise APIError(403, "to scale, send the server's --admin-key in the header X-Admin-Key", code="wrong_admin_key")


def _state(engine: RoutedEngine) -> dict[str, Any]:
    return {"wanted": engine.target, "replicas": [_describe(replica) for replica in engine.replicas]}


def _describe(replica: Replica) -> dict[str, Any]:
    stats = replica.stats()
    return {
        "replica": replica.number,
        "state": replica.state,
        "node": replica.node,
        "unfinished": replica.unfinished,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": round(stats.kv_cache_usage, 4),
        "restarts": replica.restarts,
        "last_failure": replica.last_failure,
    }
