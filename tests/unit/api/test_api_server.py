"""A real server on loopback: real clients, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.api.server import ABORT, HAS_ROOM, bind, url_of
from chairlift.api.stream import unless_disconnected
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.stop import StopMatcher

pytestmark = pytest.mark.anyio
Live = Callable[[ASGIApp], AbstractAsyncContextManager[str]]
HI = {"model": "tiny", "prompt": "Hi"}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def settled(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; the test's own time limit ends the wait if it never does."""
    while not condition():
        await asyncio.sleep(0.005)


# ---- the openai client ----


async def test_openai_chat(app: FastAPI, live: Live) -> None:
    async with live(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=50, temperature=0)
        assert answer.choices[0].message.content == "Hello world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12

        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, usage = ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["Hello world"] * 2
        assert usage is not None
        assert usage.completion_tokens == 24


async def test_openai_completions(app: FastAPI, live: Live) -> None:
    async with live(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "org/tiny"]
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, stop=["wor"])
        assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "Hello ") for i in range(4)]
        tokens = await client.completions.create(model="tiny", prompt=[[72], [105]], extra_body={"top_k": 5})
        assert [choice.text for choice in tokens.choices] == ["Hello world"] * 2
        stream = await client.completions.create(model="tiny", prompt="Hi", stop=["lo w"], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hel"


async def test_openai_errors(app: FastAPI, live: Live, engine: Any) -> None:
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0}
    async with live(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
        with pytest.raises(openai.NotFoundError, match="served here: tiny"):
            await client.chat.completions.create(model="huge", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature should be") as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
        assert caught.value.param == "temperature"
        engine.die_after = 4
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await client.completions.create(model="tiny", prompt="Hi")
        stream = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            async for _ in stream:
                pass


# ---- clients that leave ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_hangs_up_before_the_first_token(
    app: FastAPI, live: Live, engine: Any, path: str, stream: bool
) -> None:
    engine.pause = lambda: 3600.0
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    async with live(app) as url:
        _, writer = await connect(url)
        writer.write(request_bytes(path, {"model": "tiny", "stream": stream, "n": 3} | prompt))
        await settled(lambda: engine.running == 3)
        writer.close()
        await settled(lambda: engine.running == 0)
    assert engine.ends == ["abort"] * 3


async def test_hundreds_of_clients_that_hang_up_at_random_moments_leave_nothing(
    app: FastAPI, live: Live, engine: Any
) -> None:
    rng = random.Random(0)
    engine.pause = lambda: rng.random() * 0.004
    async with live(app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/completions", json=HI)).status_code == 200
        await asyncio.sleep(0.05)
        baseline = asyncio.all_tasks()
        engine.ends.clear()

        async def leave_early() -> None:
            body = {"stream": rng.random() < 0.5, "n": rng.randint(1, 3), "stop": ["never"], "max_tokens": 100}
            request = request_bytes("/v1/completions", HI | body)
            reader, writer = await connect(url)
            writer.write(request if rng.random() < 0.9 else request[: rng.randrange(len(request))])
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.5:
                writer.transport.abort()  # a reset
            writer.close()
            del reader

        await asyncio.gather(*(leave_early() for _ in range(300)))
        await settled(lambda: engine.running == 0 and asyncio.all_tasks() <= baseline)
        assert len(engine.ends) == len(engine.asked) - 1
        assert engine.ends.count("abort") > 100
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await client.post("/v1/completions", json=HI)
            assert answer.json()["choices"][0]["text"] == "Hello world"
            metrics = (await client.get("/metrics")).text
    counted = 'chairlift:request_success_total{finished_reason="abort",model_name="tiny"} '
    [aborts] = [line.removeprefix(counted) for line in metrics.splitlines() if line.startswith(counted)]
    assert float(aborts) == engine.ends.count("abort")
    gc.collect()  # a task or generator that was forgotten would warn, and a warning is an error
    assert not [thing for thing in gc.get_objects() if type(thing) in (IncrementalDetokenizer, StopMatcher)]


async def test_a_reader_that_never_reads_delays_nobody_and_can_leave(app: FastAPI, live: Live, engine: Any) -> None:
    engine.reply = b"x" * 120
    async with live(app) as url:
        writers = []
        for _ in range(5):
            sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.sendall(request_bytes("/v1/completions", HI | {"stream": True, "n": 128, "max_tokens": 120}))
            writers.append(sock)
        await settled(lambda: len(engine.asked) == 5 * 128)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            answer = await client.post("/v1/completions", json=HI | {"max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == "xxxxx"
        for sock in writers:
            sock.close()
        await settled(lambda: engine.running == 0)


async def test_work_is_gone_when_a_hang_up_is_reported() -> None:
    ended = False
    baseline = asyncio.all_tasks()

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            ended = True

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(receive, work())
    assert ended
    assert asyncio.all_tasks() == baseline


async def test_cancelling_the_request_cancels_its_work(app: FastAPI, engine: Any) -> None:
    engine.pause = lambda: 3600.0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for stream in (False, True):
            request = asyncio.create_task(client.post("/v1/completions", json=HI | {"stream": stream}))
            await settled(lambda: engine.running == 1)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert engine.running == 0


# ---- bodies on the wire ----


async def test_a_ten_megabyte_body_gets_its_413(app: FastAPI, live: Live) -> None:
    content = b'{"model": "tiny", "prompt": "' + b"x" * 10 * 1024**2 + b'"}'

    async def chunks() -> Any:
        for start in range(0, len(content), 65536):
            yield content[start : start + 65536]

    headers = {"content-type": "application/json"}
    async with live(app) as url, httpx.AsyncClient(base_url=url) as client:
        for body in (content, chunks()):
            response = await client.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert (await client.post("/v1/completions", json=HI)).status_code == 200


async def test_a_body_that_is_announced_as_too_large_is_not_waited_for(app: FastAPI, live: Live) -> None:
    async with live(app) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes("/v1/completions", HI | {"user": "x" * 200_000})[:200])
        assert b"413" in await reader.readline()
        writer.close()


async def test_a_body_that_comes_byte_by_byte(app: FastAPI, live: Live) -> None:
    async with live(app) as url:
        reader, writer = await connect(url)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request_bytes("/v1/completions", HI):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert b"200 OK" in await reader.readline()
        writer.close()


async def test_headers_without_end_are_not_kept(app: FastAPI, live: Live) -> None:
    async with live(app) as url:
        for start in (
            b"GET /",
            b"GET /health HTTP/1.1\r\nX-Long: ",
            b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 9000,
        ):
            reader, writer = await connect(url)
            writer.write(start)
            for _ in range(20):
                writer.write(b"a" * 65_536)
            assert b"431" in await reader.readline()
            writer.close()


async def test_a_large_body_before_the_next_request_counts_as_no_header(app: FastAPI, live: Live) -> None:
    async with live(app) as url:
        reader, writer = await connect(url)
        request = request_bytes("/v1/completions", HI | {"user": "x" * 90_000})
        writer.write(request + request[:50])
        assert b"200 OK" in await reader.readline()
        writer.write(request[50:])
        answers = b""
        while b"200 OK" not in answers:
            answers += await reader.read(65_536)
        writer.close()


async def test_what_is_no_http(app: FastAPI, live: Live) -> None:
    async with live(app) as url:
        bad_length = b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"
        for nonsense in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", bad_length):
            reader, writer = await connect(url)
            writer.write(nonsense)
            writer.write_eof()
            await reader.read()
            writer.close()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/completions", json=HI)).status_code == 200


# ---- the socket and the end ----


def test_a_port_in_use_is_told_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: .*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "flag"),
    [("no.such.host.invalid", 8000, "--host"), ("x" * 300, 8000, "--host"), ("127.0.0.1", 99999, "--port"),
     ("127.0.0.1", -1, "--port"), ("192.0.2.1", 0, "--host")],
)  # fmt: skip
def test_an_address_that_cannot_be(host: str, port: int, flag: str) -> None:
    with pytest.raises(OSError, match=flag):
        bind(host, port)


def test_the_url_of_a_socket_on_all_addresses_is_local() -> None:
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


SERVER = """
import asyncio, sys
from chairlift.api.lifecycle import Lifecycle
from chairlift.api.server import bind, run, serve

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    try:
        await asyncio.sleep(float(scope["path"][1:]))
    except asyncio.CancelledError:
        print("cut off", flush=True)
        raise
    await send({"type": "http.response.body", "body": b" ended", "more_body": False})

async def main():
    lifecycle = Lifecycle()
    lifecycle.on_drain(lambda: print("draining", flush=True))
    sock = bind("127.0.0.1", 0)
    await serve(
        app, sock, on_ready=lambda url: print(url, flush=True), lifecycle=lifecycle, shutdown_timeout=1
    )
    print("closed", flush=True)

run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_returns_to_the_caller(signum: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.stream("GET", f"{url}/0.3") as response:
            chunks = response.iter_raw()
            assert next(chunks) == b"begun"
            server.send_signal(signum)
            assert b"".join(chunks) == b" ended"
        assert server.stdout.read() == "draining\nclosed\n"
        assert server.wait() == 0


def test_an_answer_that_does_not_end_is_cut_off() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.stream("GET", f"{url}/3600", timeout=60) as response:
            chunks = response.iter_raw()
            assert next(chunks) == b"begun"
            server.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                next(chunks)
        assert server.stdout.read() == "draining\ncut off\nclosed\n"
        assert server.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(signum: signal.Signals) -> None:
    script = SERVER.replace("shutdown_timeout=1", "shutdown_timeout=3600")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.stream("GET", f"{url}/3600", timeout=60) as response:
            chunks = response.iter_raw()
            assert next(chunks) == b"begun"
            server.send_signal(signal.SIGTERM)
            assert server.stdout.readline() == "draining\n"
            server.send_signal(signum)
            with pytest.raises(httpx.RemoteProtocolError):
                next(chunks)
        assert server.wait(30) == 0


@pytest.mark.parametrize("module", ["chairlift.api.app", "chairlift.api.server", "chairlift.engine.metrics"])
def test_the_api_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    arguments: Sequence[str] = [sys.executable, "-c", code]
    assert subprocess.run(arguments, check=False).returncode == 0


async def test_a_client_on_this_machine_does_not_say_itself_who_it_is(live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # which uvicorn would heed

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse([scope["client"][0], scope["scheme"]])(scope, receive, send)

    async with live(app) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/", headers={"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "https"})
    assert answer.json() == ["127.0.0.1", "http"]


async def test_an_application_can_drop_a_connection(live) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert scope[HAS_ROOM]()
        await send({"type": "http.response.body", "body": b"x" * 10_000_000, "more_body": True})
        assert not scope[HAS_ROOM]()
        scope[ABORT]()

    async with live(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read(-1)) < 10_000_000
        writer.close()
