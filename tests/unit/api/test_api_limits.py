"""Requests that take too long, come when there is no room, or are open when the server shuts down."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from chairlift.api.lifecycle import Lifecycle
from chairlift.api.server import bind, serve
from chairlift.config import ServerConfig
from chairlift.engine.client import EngineDeadError, EngineStats

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/completions", HI), ("/v1/chat/completions", CHAT)])
Make = Callable[..., FastAPI]


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def last_error(stream: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(stream.strip().splitlines()[-1].removeprefix("data: "))["error"]
    return error


def pausing(steps: int) -> Callable[[], float]:
    """Goes on at once for so many steps, and then never."""
    pauses = iter([0.0] * steps)
    return lambda: next(pauses, 3600.0)


def connecting(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test", timeout=60
    )


# ---- --request-timeout ----


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_a_504(
    make_app: Make, engine: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.pause = lambda: 3600.0
    async with connecting(make_app(ServerConfig(request_timeout=0.05))) as client:
        response = await client.post(path, json=body | {"stream": stream, "n": 2})
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    assert "0.05 seconds" in error["message"]
    assert engine.ends == ["abort"] * 2


@BOTH
async def test_a_stream_that_takes_too_long_ends_with_an_error(
    make_app: Make, engine: Any, path: str, body: dict[str, Any]
) -> None:
    engine.pause = pausing(3)
    async with connecting(make_app(ServerConfig(request_timeout=0.5))) as client:
        response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert sum(letter in response.text for letter in ['"H"', '"e"', '"l"']) == 3
    assert last_error(response.text)["code"] == "request_timeout"
    assert "[DONE]" not in response.text
    assert engine.ends == ["abort"]


async def test_a_body_that_takes_too_long_is_a_408_and_costs_no_other_request(make_app: Make, live: Any) -> None:
    app = make_app(ServerConfig(request_timeout=0.3))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    async with live(app) as url, httpx.AsyncClient(base_url=url) as client:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        for _ in range(3):
            writer.write(b" ")
            assert (await client.post("/v1/completions", json=HI)).status_code == 200
        answer = await reader.read()  # to the end: the connection is closed
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        writer.close()


async def test_bodies_and_heads_that_never_come_give_their_places_back(
    app: FastAPI, live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever time an answer may take."""
    monkeypatch.setattr("chairlift.api.lifecycle.BODY_SECONDS", 0.1)
    monkeypatch.setattr("chairlift.api.server.HEAD_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    async with live(app) as url:
        host, port = url.removeprefix("http://").split(":")
        for sent, said in ((head, b"body did not arrive"), (head[:30], b"no whole request line"), (b"", b"no whole")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408")
            assert said in answer
            writer.close()
        async with httpx.AsyncClient(base_url=url) as client:  # a connection between two requests is not late
            for _ in range(2):
                assert (await client.post("/v1/completions", json=HI)).status_code == 200
                await asyncio.sleep(0.3)


async def test_a_request_in_time_is_not_disturbed(make_app: Make) -> None:
    app = make_app(ServerConfig(request_timeout=60))
    async with connecting(app) as client:
        assert (await client.post("/v1/completions", json=HI)).json()["choices"][0]["text"] == "Hello world"


# ---- no room ----


async def test_no_more_requests_are_read_than_there_is_room_for(make_app: Make, engine: Any) -> None:
    """Their bodies take memory before their sequences do."""
    engine.pause = lambda: 3600.0
    lifecycle = Lifecycle(max_open=2)
    app = make_app(ServerConfig(), lifecycle=lifecycle)
    async with connecting(app) as client:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=HI)) for _ in range(2)]
        await settled(lambda: engine.running == 2)
        refused = await client.post("/v1/completions", json=HI)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert (await client.get("/health")).status_code == 200
        for control in ("/scale", "/replicas"):  # of a server with replicas, and unknown to this one
            assert (await client.post(control, json={})).status_code == 404
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert not lifecycle.open
        engine.pause = lambda: 0.0
        assert (await client.post("/v1/completions", json=HI)).status_code == 200


# ---- an engine that is away ----


async def test_while_there_is_no_engine(
    client: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: object, **__: object) -> None:
        raise EngineDeadError("it broke; another engine is being started", 7.2)

    monkeypatch.setattr(type(engine), "generate", generate)
    engine.health = EngineStats(alive=False, retry_after=7.2, restarts=3, last_failure="it broke")
    for stream in (False, True):
        response = await client.post("/v1/completions", json=HI | {"stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "8"
    health, ready = await client.get("/health"), await client.get("/ready")
    assert (health.status_code, ready.status_code) == (200, 503)
    assert ready.headers["retry-after"] == "8"
    assert health.json() == ready.json()
    assert (health.json()["status"], health.json()["last_failure"]) == ("restarting", "it broke")
    metrics = (await client.get("/metrics")).text
    assert 'chairlift:engine_up{model_name="tiny"} 0.0' in metrics
    assert 'chairlift:engine_restarts_total{model_name="tiny"} 3.0' in metrics
    assert 'chairlift:request_success_total{finished_reason="error",model_name="tiny"} 2.0' in metrics


# ---- shutting down ----


async def test_while_the_server_drains_it_is_alive_not_ready_and_refuses_what_comes(
    make_app: Make, engine: Any
) -> None:
    engine.pause = lambda: 0.02
    lifecycle = Lifecycle()
    async with connecting(make_app(ServerConfig(), lifecycle=lifecycle)) as client:
        assert (await client.get("/ready")).status_code == 200
        opened = asyncio.create_task(client.post("/v1/completions", json=HI))
        await settled(lambda: engine.running == 1)
        lifecycle.drain()
        assert (await client.get("/ready")).status_code == 503
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        refused = await client.post("/v1/completions", json=HI)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "shutting_down"
        assert (await client.get("/metrics")).status_code == 200
        assert (await opened).json()["choices"][0]["text"] == "Hello world"


async def begin_serving(app: FastAPI, lifecycle: Lifecycle, timeout: float) -> tuple[asyncio.Task[None], str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(app, bind("127.0.0.1", 0), on_ready=ready.set_result, lifecycle=lifecycle, shutdown_timeout=timeout)
    )
    return serving, await ready


async def test_what_is_open_at_the_timeout_ends_with_an_error(
    make_app: Make, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams by an event, the others by a status; idle connections are just closed."""
    lifecycle = Lifecycle()
    serving, url = await begin_serving(make_app(ServerConfig(), lifecycle=lifecycle), lifecycle, 0.3)
    host, port = url.removeprefix("http://").split(":")
    engine.pause = pausing(3)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        stream = asyncio.create_task(client.post("/v1/completions", json=HI | {"stream": True}))
        await settled(lambda: engine.running == 1)
        whole = asyncio.create_task(client.post("/v1/completions", json=HI))
        await settled(lambda: engine.running == 2)
        _, idle = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.05)
        serving.cancel()  # what a signal does
        assert last_error((await stream).text)["code"] == "shutting_down"
        response = await whole
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        with pytest.raises(asyncio.CancelledError):
            await serving
        idle.close()
    assert engine.running == 0
    assert "Exception in ASGI application" not in caplog.text
    assert "requests are ended unfinished" in caplog.text


async def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(make_app: Make, engine: Any) -> None:
    engine.reply = b"x" * 120
    lifecycle = Lifecycle()
    serving, url = await begin_serving(make_app(ServerConfig(), lifecycle=lifecycle), lifecycle, 0.2)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(HI | {"stream": True, "n": 128, "max_tokens": 120}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection((host, int(port))) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.sendall(head.encode() + b"\r\n" + body)
        await settled(lambda: len(engine.ends) == 128)
        assert len(lifecycle.open) == 1
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert not lifecycle.open
