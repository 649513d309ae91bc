"""Clients that close their sending side after a request still get the answer; those that are gone do not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from chairlift.config import ServerConfig

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "prompt": "Hi"}
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def request_bytes(body: dict[str, Any], version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_connection_gets_its_answer(app: FastAPI, live: Any, engine: Any, stream: bool) -> None:
    engine.pause = lambda: 0.05
    async with live(app) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes(HI | {"stream": stream}))
        writer.write_eof()
        answer = await reader.read()  # to the end: the connection cannot be used again, and is closed
        writer.close()
    assert answer.startswith(INTERIM)
    final = answer.replace(INTERIM, b"")
    assert final.startswith(b"HTTP/1.1 200 OK")
    assert final.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert engine.ends == ["stop"]


async def test_requests_in_a_row_on_a_half_closed_connection(app: FastAPI, live: Any, engine: Any) -> None:
    """No interim response gets into the middle of an earlier answer."""
    engine.pause = lambda: 0.05
    async with live(app) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes(HI | {"stream": True}) + request_bytes(HI))
        writer.write_eof()
        answer = await reader.read()
        writer.close()
    first, _, second = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert INTERIM not in first
    assert second.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK")
    assert engine.ends == ["stop", "stop"]


@pytest.mark.parametrize("leave", ["close", "shutdown and close", "reset"])
async def test_one_that_is_gone_before_its_answer_is_noticed(app: FastAPI, live: Any, engine: Any, leave: str) -> None:
    engine.pause = lambda: 3600.0
    async with live(app) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes(HI))
        await settled(lambda: engine.running == 1)
        if leave == "shutdown and close":
            writer.write_eof()
            assert await reader.readexactly(len(INTERIM)) == INTERIM
            assert engine.running == 1
        if leave == "reset":
            writer.transport.abort()
        writer.close()
        await settled(lambda: engine.running == 0)
    assert engine.ends == ["abort"]


async def test_half_of_a_request_and_http_1_0_are_hang_ups(app: FastAPI, live: Any, engine: Any) -> None:
    """The rest can never come; and of HTTP/1.0 no client passes over an interim response."""
    engine.pause = lambda: 3600.0
    async with live(app) as url:
        for sent in (request_bytes(HI)[:-3], request_bytes(HI)[:20], request_bytes(HI, "1.0"), b""):
            reader, writer = await connect(url)
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        await settled(lambda: engine.running == 0)
    assert engine.ends in ([], ["abort"])


async def test_a_connection_that_dies_without_a_word_ends_with_its_time(make_app: Any, live: Any, engine: Any) -> None:
    """No TCP stack answers for a machine that was switched off: only the time limit helps."""
    engine.pause = lambda: 3600.0
    async with live(make_app(ServerConfig(request_timeout=0.3))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(request_bytes(HI))
            await settled(lambda: engine.running == 1)
            await settled(lambda: engine.running == 0)
    assert engine.ends == ["abort"]
