"""HTTP/1.1 to one server, on connections that are kept open.

What a general HTTP client does besides (cookies, redirects, compression, hooks) took a fifth of the router's processor
time for a request and a tenth of that for a token. So this is no more than the router needs: asyncio's transports and
llhttp, which parses the answers.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections import deque
from collections.abc import Callable, Mapping

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from yarl import URL

KEEP_ALIVE_SECONDS = 4.0
"""Idle connections are closed before the usual servers do it (uvicorn after 5 s), or now and then a request would go
out on one that is just being closed."""
MOST_HEAD_BYTES = 64 * 1024
"""Most that an answer may have before its body, or after it, give or take one read of the socket."""
MOST_WAITING_BYTES = 64 * 1024
"""Beyond that no more is read until the pieces that came have been taken."""
USUALLY_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
NO_BODY_STATUSES = (204, 304)
LINE_BREAKS = re.compile(r"[\r\n\0]")

Take = Callable[[bytes], bool]
"""Is called with a piece the moment that it comes. Returns whether it has dealt with it."""


class UpstreamError(Exception):
    """No answer, or not the whole of it.

    Attributes:
        reached: whether the server may have seen the request.
    """

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it.

    Args:
        keep: takes it back when it can serve another request.

    Attributes:
        status: of the answer.
        headers: of the answer, with names in lower case.
    """

    _transport: asyncio.Transport
    _paused: bool

    def __init__(self, keep: Callable[[Connection], None]) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self._failure: str | None = None
        self._begin("")
        self._ended = True

    @property
    def closed(self) -> bool:
        """No request can be sent on it any more, also while asyncio has yet to say that it is lost."""
        return self._transport.is_closing()

    async def send(self, method: str, request: bytes) -> None:
        """Sends a request, and returns when the status and the headers of the answer are there.

        Raises:
            UpstreamError: there is no answer.
        """
        self._begin(method)
        self._transport.write(request)
        while not self._head_is_here:
            if self._failure is not None:
                raise UpstreamError(f"no answer: {self._failure}")
            await self._news()

    async def piece(self, take: Take | None = None) -> bytes:
        """Returns what has come of the body since the last time, or else what comes next; nothing at its end.

        Args:
            take: gets what comes meanwhile, and only what it does not take is returned. To wake a task for every piece,
                through all that it awaits, costs more than what is done with the piece.

        Raises:
            UpstreamError: it broke off.
            Exception: of ``take``.
        """
        while not self._pieces:
            if self._ended:
                return b""
            if self._failure is not None:
                raise UpstreamError(f"the connection broke: {self._failure}")
            self._take = take
            await self._news()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return self._taken_out()

    def release(self) -> None:
        """The answer has been read, as far as anybody cares. Unless it came to its end, the server is cut off."""
        usable = self._reusable and not self._paused and not self.closed
        if usable and self._transport.get_write_buffer_size() == 0:
            self._keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    def _begin(self, method: str) -> None:
        self._is_head = method == "HEAD"
        self.headers = []
        self._bare_bytes = 0
        self._head_is_here = self._ended = self._until_close = self._reusable = self._paused = False
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0

    def _taken_out(self) -> bytes:
        pieces = self._pieces
        self._pieces = []
        self._waiting_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _news(self) -> None:
        """Waits until something comes, or the connection ends."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self._take = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, cause: str) -> None:
        self._failure = self._failure or cause
        self.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is connected."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._ended:  # nothing was asked, such as a server's word that it closes an idle connection
            self._reusable = False
            self.abort()
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail("the server changes to another protocol")
        except HttpParserError as error:
            self._fail(f"the answer is no HTTP ({error})")
        if self._bare_bytes > MOST_HEAD_BYTES:
            self._fail(f"the answer's headers are larger than {MOST_HEAD_BYTES} bytes")
        if self._head_is_here and self._pieces and self._take is not None:
            self._offer(self._take)
        if self._waiting_bytes > MOST_WAITING_BYTES and not self._ended and not self.closed:
            self._paused = True
            self._transport.pause_reading()
        if self._pieces or self._ended or self._failure is not None or self._take is None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if exc is None and self._failure is None and self._head_is_here and self._until_close:
            self._ended = True
        self._failure = self._failure or (str(exc) if exc else "the server closed the connection")
        self._wake()

    def _offer(self, take: Take) -> None:
        """Lets whoever waits for a piece take it here and now."""
        if self._waiter is None or self._waiter.done():
            return
        piece = self._taken_out()
        try:
            taken = take(piece)
        except Exception as error:  # of the one who waits
            self._waiter.set_exception(error)
            return
        if not taken:
            self._pieces = [piece]
            self._waiting_bytes = len(piece)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """An answer begins; a second one to the same request makes it unclear what the next request's would be."""
        if self._ended:
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after the body a trailer, which nobody asked for."""
        if not self._head_is_here:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The body, if any, is next."""
        if self._ended:
            return
        self.status = self._parser.get_status_code()
        if not 100 <= self.status <= 599:
            self._fail(f"there is no status {self.status}")
            return
        if self.status < 200:  # an interim answer; another one follows
            self.headers = []
            return
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):  # the body would be passed on as something that it is not
            self._fail(f"a transfer coding that nobody asked for: {b', '.join(codings).decode('latin-1')}")
            return
        self._head_is_here = True
        measured = codings or any(name == b"content-length" for name, _ in self.headers)
        self._until_close = not measured and self.status not in NO_BODY_STATUSES
        if self._is_head:  # the parser does not know that no body comes, so this connection is of no further use
            self._ended = True

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        self._bare_bytes = 0
        if not self._ended:
            self._pieces.append(piece)
            self._waiting_bytes += len(piece)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._head_is_here and not self._ended:
            self._ended = True
            self._reusable = self._parser.should_keep_alive()


class Connections:
    """All connections to one server.

    Args:
        url: its base URL; a user and a password in it are sent where the request has no ``Authorization``.
        connect_timeout: seconds for a connection to be there, TLS included.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        base = URL(url)
        self._host, self._port = base.raw_host or "", base.port or 80
        self._host_header = base.raw_authority.rpartition("@")[2]
        self._path = base.raw_path.rstrip("/")
        self._tls = ssl.create_default_context() if base.scheme == "https" else None
        self._basic: str | None = None
        if base.user is not None:
            self._basic = base64.b64encode(f"{base.user}:{base.password or ''}".encode()).decode()
        self._connect_timeout = connect_timeout
        self._idle: deque[tuple[float, Connection]] = deque()
        self._sweeping: asyncio.TimerHandle | None = None

    async def request(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Connection:
        """Sends a request and returns the answer when its headers are there. Release it.

        Args:
            method: such as ``POST``.
            target: path and query below the base URL, as they are to be sent.
            headers: without ``host`` and ``content-length``, which are added here.
            body: whole.

        Raises:
            UpstreamError: there is no answer.
        """
        request = self._head(method, target, headers, body) + body
        connection = self._kept() or await self._connect()
        try:
            await connection.send(method, request)
        except BaseException:
            connection.abort()
            raise
        return connection

    def close(self) -> None:
        """Closes those that are idle."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        while self._idle:
            self._idle.pop()[1].abort()

    def _head(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"{method} {self._path}{target} HTTP/1.1", f"host: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method not in USUALLY_WITHOUT_BODY:
            lines.append(f"content-length: {len(body)}")
        if self._basic is not None and "authorization" not in headers:
            lines.append(f"authorization: Basic {self._basic}")
        if any(map(LINE_BREAKS.search, lines)):
            raise UpstreamError("a line of the request would be two", reached=False)
        try:
            return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        except UnicodeEncodeError as error:
            raise UpstreamError(f"a header that HTTP has no letters for: {error}", reached=False) from error

    def _kept(self) -> Connection | None:
        """One that is open and has not been idle for long."""
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while self._idle:
            since, connection = self._idle.pop()
            if connection.closed:
                continue
            if since >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._keep), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise UpstreamError("cannot connect: no answer within the time limit", reached=False) from error
        except (OSError, ValueError) as error:  # the latter: a name that cannot be one
            cause = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise UpstreamError(f"cannot connect: {cause}", reached=False) from error
        return connection

    def _keep(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEP_ALIVE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Closes those that were idle for too long, the first of which stand on the left."""
        loop = asyncio.get_running_loop()
        self._sweeping = None
        while self._idle and (self._idle[0][1].closed or self._idle[0][0] + KEEP_ALIVE_SECONDS <= loop.time()):
            self._idle.popleft()[1].abort()
        if self._idle:
            self._sweeping = loop.call_at(self._idle[0][0] + KEEP_ALIVE_SECONDS, self._sweep)
