"""The router's connections to its servers: what it takes for an answer, and when it uses a connection again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trustme
import uvloop

from chairlift.canary import connection as module
from chairlift.canary.connection import Connections, UpstreamError

OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: 2\r\n\r\nok"
HANG = b""


class Server:
    """Answers the n-th request with the n-th of its answers; a ``None`` after one closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.gone = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length")), 0)
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self.answers.pop(0) or b"")
                await writer.drain()
                if self.answers and self.answers[0] is None:
                    self.answers.pop(0)
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone += 1
        finally:
            writer.close()


@asynccontextmanager
async def served(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a test against a server, on each of the two loops."""

    def go(test: Callable[[Connections, Server], Awaitable[None]], *answers: bytes | None) -> None:
        async def main() -> None:
            server = Server(*answers)
            async with served(server) as port:
                connections = Connections(f"http://127.0.0.1:{port}", 5.0)
                try:
                    await asyncio.wait_for(test(connections, server), 20)
                finally:
                    connections.close()

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    return go


async def ask(connections: Connections, method: str = "POST", body: bytes = b"{}") -> tuple[int, bytes]:
    answer = await connections.request(method, "/x?y=1", {"a": "b"}, body)
    whole = b""
    try:
        while piece := await answer.piece():
            whole += piece
    finally:
        answer.release()
    return answer.status, whole


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nx-trailer: 1\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WHOLE


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, INTERIM], ids=["length", "chunked", "interim"])
def test_an_answer_that_ends_leaves_the_connection_for_the_next_request(run, answer: bytes):
    async def check(connections: Connections, server: Server) -> None:
        for _ in range(3):
            assert await ask(connections) == (200, b"ok")
        assert server.connections == 1
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\na: b\r\ncontent-length: 2" in head
        assert body == b"{}"

    run(check, answer, answer, answer)


@pytest.mark.parametrize(
    ("answers", "body"),
    [
        ((OK + b"\r\nok", None), b"ok"),  # its end is the connection's
        ((OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok",), b"ok"),
        ((b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",), b"ok"),
        ((WHOLE + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother",), b"ok"),  # which request would it answer?
        ((WHOLE + b"HTTP/1.1 2",), b"ok"),
    ],
    ids=["until_close", "close", "old", "two_answers", "half_an_answer_more"],
)
def test_some_answers_are_the_last_on_their_connection(run, answers: tuple[bytes | None, ...], body: bytes):
    async def check(connections: Connections, server: Server) -> None:
        assert await ask(connections) == (200, body)
        assert await ask(connections) == (200, b"ok")
        assert server.connections == 2

    run(check, *answers, WHOLE)


def test_answers_without_a_body(run):
    async def check(connections: Connections, server: Server) -> None:
        assert await ask(connections, "HEAD", b"") == (200, b"")  # no body, whatever its headers say
        assert b"content-length" not in server.requests[0]
        assert await ask(connections, "DELETE", b"") == (204, b"")
        assert b"content-length: 0" in server.requests[1]
        assert await ask(connections, "GET", b"") == (304, b"")
        assert server.connections == 2

    nothing = b"HTTP/1.1 204 No Content\r\n\r\n"
    run(check, OK + b"content-length: 500\r\n\r\n", nothing, b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HANG, "no answer: the server closed the connection"),
        (OK, "no answer: the server closed the connection"),
        (b"hello", "no answer: the answer is no HTTP"),
        (OK + b"a: " + b"b" * 400_000, "no answer: the answer's headers are larger than 65536 bytes"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            "no answer: the server changes",
        ),
        (OK + b"a: \x01\r\n\r\n", "no answer: the answer is no HTTP"),
        (OK + b"a b: c\r\n\r\n", "no answer: the answer is no HTTP"),
        (OK + b"content-length: 3\r\n\r\nok", "the connection broke: the server closed the connection"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\no\r\n", "the connection broke: the server closed"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\no\r\nzz\r\n", "the connection broke: the answer is no HTTP"),
        (
            OK + b"transfer-encoding: chunked\r\n\r\n1\r\no\r\n0\r\na: " + b"b" * 400_000,
            "the connection broke: the answer's headers are larger than 65536 bytes",
        ),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 10_000, "no answer: the answer's headers are larger than 65536 bytes"),
        (b"HTTP/1.1 600 Odd\r\ncontent-length: 2\r\n\r\nok", "no answer: there is no status 600"),
        (b"HTTP/1.1 042 Odd\r\ncontent-length: 2\r\n\r\nok", "no answer: there is no status 42"),
        (
            OK + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\no\r\n0\r\n\r\n",
            "no answer: a transfer coding .* gzip, chu",
        ),
        (OK + b"transfer-encoding: chunked\r\ntransfer-encoding: x\r\n\r\n1\r\no\r\n", "no answer: a transfer coding"),
        (OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n1\r\no\r\n", "no answer: the answer is no HTTP"),
    ],
    ids=[
        "silence",
        "half_a_head",
        "no_http",
        "large_head",
        "upgrade",
        "bad_value",
        "bad_name",
        "short",
        "no_last_chunk",
        "bad_chunk",
        "large_trailer",
        "interim_for_ever",
        "status_600",
        "status_42",
        "gzip",
        "two_codings",
        "two_lengths",
    ],
)
def test_answers_that_are_none(run, answer: bytes, message: str):
    async def check(connections: Connections, server: Server) -> None:
        with pytest.raises(UpstreamError, match=message) as caught:
            await ask(connections)
        assert caught.value.reached
        assert await ask(connections) == (200, b"ok")
        assert server.connections == 2

    run(check, answer, None, WHOLE)


def test_nothing_was_sent_where_nobody_listens_or_the_request_is_none(run):
    async def check(connections: Connections, server: Server) -> None:
        nobody = Connections("http://127.0.0.1:9", 5.0)
        for headers, where, message in (
            ({}, nobody, "cannot connect: "),
            ({"a": "b\r\nc: d"}, connections, "would be two"),
            ({"a": "ę"}, connections, "no letters"),
        ):
            with pytest.raises(UpstreamError, match=message) as caught:
                await where.request("GET", "/", headers, b"")
            assert not caught.value.reached
        assert server.requests == []

    run(check)


def test_a_connection_that_the_server_gave_up_is_not_used_again(run):
    async def check(connections: Connections, server: Server) -> None:
        assert await ask(connections) == (200, b"ok")
        await asyncio.sleep(0.1)  # the end of the connection comes
        assert await ask(connections) == (200, b"ok")
        assert server.connections == 2

    run(check, WHOLE, None, WHOLE)


def test_nor_is_one_whose_loss_asyncio_has_yet_to_tell(run, monkeypatch: pytest.MonkeyPatch):
    async def check(connections: Connections, server: Server) -> None:
        asked: list[asyncio.Task[tuple[int, bytes]]] = []

        def ended(_: module.Connection) -> None:  # the request goes out between this and ``connection_lost``
            asked.append(asyncio.ensure_future(ask(connections)))

        assert await ask(connections) == (200, b"ok")
        with monkeypatch.context() as patch:
            patch.setattr(module.Connection, "eof_received", ended)
            server.writers[0].close()
            await until(lambda: bool(asked))
        assert await asked[0] == (200, b"ok")
        assert server.connections == 2

    run(check, WHOLE, WHOLE)


def test_idle_connections_are_closed(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.2)

    async def check(connections: Connections, server: Server) -> None:
        await asyncio.gather(*(ask(connections) for _ in range(3)))
        assert server.connections == 3
        assert server.gone == 0
        await until(lambda: server.gone == 3)
        assert await ask(connections) == (200, b"ok")

    run(check, WHOLE, WHOLE, WHOLE, WHOLE)


def test_an_answer_that_nobody_wants_is_cut_off(run):
    async def check(connections: Connections, server: Server) -> None:
        answer = await connections.request("GET", "/", {}, b"")
        answer.release()
        await until(lambda: server.gone == 1)
        waiting = asyncio.create_task(ask(connections))
        await until(lambda: len(server.requests) == 2)
        waiting.cancel()
        await until(lambda: server.gone == 2)

    run(check, OK + b"content-length: 9\r\n\r\n", HANG)


def test_a_server_waits_while_nobody_takes_what_it_sends(run):
    size = 64 * 1024 * 1024

    async def check(connections: Connections, server: Server) -> None:
        answer = await connections.request("GET", "/", {}, b"")
        await asyncio.sleep(0.3)
        got = len(await answer.piece())
        assert got < 1024 * 1024
        while piece := await answer.piece():
            got += len(piece)
        assert got == size
        answer.release()

    run(check, OK + b"content-length: %d\r\n\r\n" % size + bytes(size))


def test_pieces_can_be_taken_as_they_come(run):
    async def check(connections: Connections, server: Server) -> None:
        taken: list[bytes] = []

        def take(piece: bytes) -> bool:
            if piece == b"fault":
                raise ValueError("of the one who takes")
            taken.append(piece)
            return piece != b"no"

        def send(piece: bytes) -> None:
            server.writers[0].write(b"%x\r\n%b\r\n" % (len(piece), piece))

        answer = await connections.request("GET", "/", {}, b"")
        waiting = asyncio.create_task(answer.piece(take))
        for piece in (b"yes", b"and"):
            await asyncio.sleep(0.05)
            send(piece)
        await until(lambda: taken == [b"yes", b"and"])
        assert not waiting.done()
        send(b"no")
        assert await waiting == b"no"
        send(b"later")  # while nobody waits
        await asyncio.sleep(0.1)
        assert await answer.piece(take) == b"later"
        waiting = asyncio.create_task(answer.piece(take))
        await asyncio.sleep(0.05)
        send(b"fault")
        with pytest.raises(ValueError, match="of the one who takes"):
            await waiting
        server.writers[0].write(b"3\r\nend\r\n0\r\n\r\n")
        assert await answer.piece(take) == b""  # taken, and then it was the end
        assert taken[-1] == b"end"
        answer.release()
        assert await ask(connections) == (200, b"ok")
        assert server.connections == 1

    run(check, OK + b"transfer-encoding: chunked\r\n\r\n", WHOLE)


def test_tls_and_a_password_in_the_address(tmp_path, monkeypatch: pytest.MonkeyPatch):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    async def main() -> None:
        server = Server(WHOLE)
        async with served(server, context) as port:
            with pytest.raises(UpstreamError, match="cannot connect") as caught:
                await ask(Connections(f"https://localhost:{port}", 5.0))
            assert not caught.value.reached
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            connections = Connections(f"https://me:p%40ss@localhost:{port}/base/", 5.0)
            assert await ask(connections) == (200, b"ok")
            connections.close()
        assert server.requests[0].startswith(b"POST /base/x?y=1 HTTP/1.1\r\nhost: localhost:%d\r\n" % port)
        assert b"\r\nauthorization: Basic bWU6cEBzcw==\r\n" in server.requests[0]

    uvloop.run(main())
