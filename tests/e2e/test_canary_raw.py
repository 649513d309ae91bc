"""The router between servers and clients that do what HTTP lets them do, or does not, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.canary_router import Routed, routed
from support.fake_upstream import DONE, FakeUpstream, chunk

from chairlift.canary import connection
from chairlift.canary.config import Timeouts

OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\nconnection: x-hop\r\nconnection: keep-alive\r\nx-hop: 1\r\n"
STABLE, CANDIDATE = (0.01, 1.0), (1.0,)
"""Steps with which the first request is that side's."""


def run(test: Callable[[Routed], Awaitable[None]], *upstreams: FakeUpstream, **settings) -> None:
    async def main() -> None:
        async with routed(*upstreams, **settings) as r:
            await asyncio.wait_for(test(r), 60)

    asyncio.run(main())


@asynccontextmanager
async def scripted(*pieces: bytes | asyncio.Event) -> AsyncIterator[str]:
    """A server that answers each request with these bytes; it waits at an event until that is set."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n"):
                await reader.readexactly(sum(int(line[15:]) for line in head if line.startswith(b"content-length")))
                for piece in pieces:
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                    else:
                        writer.write(piece)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def chunked(*pieces: bytes) -> bytes:
    head = b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("HEAD", OK + b"content-length: 9\r\n\r\n"),
        ("HEAD", OK + b"transfer-encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\netag: x\r\n\r\n"),
        ("DELETE", b"HTTP/1.1 204 No Content\r\ncontent-length: 9\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("side", ["stable", "candidate"])
def test_after_an_answer_without_a_body_the_clients_connection_goes_on(method: str, answer: bytes, side: str):
    async def check(r: Routed) -> None:
        if side == "candidate":
            await r.act("promote")
            await r.act("promote")
        async with scripted(answer) as url:
            r.replace(side, url)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
            for _ in range(2):
                writer.write(f"{method} /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(answer[:12])
                assert f"x-chairlift-canary: {side}\r\n".encode() in head
            writer.close()

    run(check)


def test_a_status_that_is_none_is_no_answer():
    async def check(r: Routed) -> None:
        async with scripted(b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}") as url:
            r.replace("stable", url)
            status, side, text = await r.ask(stream=False)
            assert (status, side) == (502, "router")
            assert "no server answered" in text

    run(check, steps=STABLE)


@pytest.mark.parametrize("event", [{"choices": 5}, {"choices": [{"delta": "x"}]}, {"choices": ["x"]}])
@pytest.mark.parametrize("side", ["stable", "candidate"])
def test_events_of_another_shape_are_the_servers_failure(side: str, event: dict):
    async def check(r: Routed) -> None:
        whole = f"data: {json.dumps(event)}\n\n".encode() + chunk("hi") + DONE
        async with scripted(EVENTS + chunked(whole)) as url:
            r.replace(side, url)
            status, by, text = await r.ask()
        assert (status, by) == (200, "stable")
        assert text == whole.decode() if side == "stable" else "stable3" in text
        assert r.router.proxy.logs[side].counts(0)["failed"] == 1

    run(check, steps=STABLE if side == "stable" else CANDIDATE)


@pytest.mark.parametrize("side", ["stable", "candidate"])
def test_streams_of_responses_pass_as_they_come_and_end_with_their_own_last_event(side: str):
    def event(kind: str, **more: object) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()

    begin = event("response.created", response={"error": None}) + event("response.output_text.delta", delta="hi")
    end = event("response.completed", response={"error": None})

    async def check(r: Routed) -> None:
        seen = asyncio.Event()
        first, rest = chunked(begin).removesuffix(b"0\r\n\r\n"), chunked(end).partition(b"\r\n\r\n")[2]
        body = {"model": "m", "input": "x", "stream": True}
        async with scripted(EVENTS + first, seen, rest) as url:
            r.replace(side, url)
            async with r.http.post(f"{r.url}/v1/responses", json=body) as response:
                assert response.headers["x-chairlift-canary"] == side
                assert "x-hop" not in response.headers
                assert await response.content.readexactly(len(begin)) == begin
                seen.set()
                assert await response.read() == end
        assert r.router.proxy.logs[side].counts(0)["answered"] == 1

    run(check, steps=STABLE if side == "stable" else CANDIDATE)


def test_a_client_on_this_machine_does_not_say_itself_who_it_is():
    async def check(r: Routed) -> None:
        await r.ask(headers={"X-Forwarded-For": "6.6.6.6"})
        assert r.stable.requests[0][1]["X-Forwarded-For"] == "6.6.6.6, 127.0.0.1"

    run(check, steps=STABLE)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["stable", "candidate"])
def test_a_client_that_reads_nothing_is_cut_off(side: str, stream: bool, monkeypatch: pytest.MonkeyPatch):
    """In the middle of a stream, and when nothing of an answer is left but its end, which has to wait as well."""

    def open_files() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.1)

    async def check(r: Routed) -> None:
        await asyncio.sleep(0.5)  # until the connections of the first probes are closed
        before = open_files()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(r.url.rpartition(":")[2])))
            body = json.dumps({"stream": stream, "max_tokens": 400_000}).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await r.until(lambda: r.router.proxy.logs[side].open_samples)
            await r.until(lambda: not r.router.proxy.logs[side].open_samples)
            await r.until(lambda: open_files() <= before + 1)  # the client's own end
            await r.until(lambda: not any("run_asgi" in repr(task) for task in asyncio.all_tasks()))
        assert r.router.proxy.logs[side].counts(0)["failed"] == 0

    many = {"first_token": 0.0, "token_gap": 0.0, "tokens": 400_000}
    steps = STABLE if side == "stable" else CANDIDATE
    run(
        check, FakeUpstream("stable", **many), FakeUpstream("candidate", **many), steps=steps,
        timeouts=Timeouts(total=2.0),
    )  # fmt: skip
