"""Runs an application under uvicorn, on a socket that is bound before anything slow begins."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.api.errors import APIError
from chairlift.api.lifecycle import Lifecycle, shutting_down
from chairlift.api.stream import encode_json
from chairlift.config import ConfigError, ServerConfig
from chairlift.garbage import keep_collections_short

logger = logging.getLogger(__name__)

BACKLOG = 2048
MAX_HEAD_BYTES = 64 * 1024
"""Most that a request may have before its body, give or take one read of the socket."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the usual idle limit of clients and proxies, so that it is they who close idle connections: a server
that closes first does so, now and then, just as a request arrives."""

HEAD_SECONDS = 60.0
"""Time for a request's line and headers to come, and for a new connection's first: each takes a file descriptor."""
MOST_OPEN_FILES = 65_536
LAST_WORDS_SECONDS = 1.0
"""Time for an answer that is cut off to say so, and for a client to take it."""
PROBE_SECONDS = 0.1
"""Between two looks whether a client that sends no more is still there."""
POLL_SECONDS = 0.02
HAS_ROOM = "chairlift.has_room"
"""Key of a scope under which a function stands that says whether ``send`` would not wait now. Then it needs no task."""
ABORT = "chairlift.abort"
"""Key of a scope under which a function stands that drops the connection, with what its client has not read."""
INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"

SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")


def allow_many_connections() -> None:
    """Raises this process's limit of open files, each connection being one, as far as it may; often from 1,024."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, without listening on it yet.

    Args:
        host: a name or an address, IPv4 or IPv6.
        port: 0 takes a free one; :func:`url_of` tells which.

    Raises:
        OSError: the address cannot be had; the message names it and says what to change.
    """
    if not 0 <= port < 2**16:  # the resolver would wrap it around
        raise OSError(f"there is no port {port}; give --port one from 0 to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(f"cannot resolve {host} ({error}); check --host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        # Linux lets no two listeners share a port by this; it only skips the wait for old connections to time out.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # A bound socket that does not listen can be bound again by another process with SO_REUSEADDR.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host"
        ) from error
    return sock


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Returns what TLS needs, or ``None`` where none is asked for.

    Raises:
        ConfigError: a file cannot be read or is not what its flag names.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        _check_readable(flag, path)
    try:
        # Without a way to ask, so that an encrypted key is an error and not a prompt that nobody sees.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} are not a PEM certificate "
            f"and its unencrypted PEM key ({_reason(error)})"
        ) from error
    if config.ssl_ca_certs is not None:
        _check_readable("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs} has no PEM certificate ({_reason(error)})"
            ) from error
        required = ssl.CERT_REQUIRED if config.ssl_cert_reqs is None else ssl.VerifyMode(config.ssl_cert_reqs)
        context.verify_mode = required
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    """What OpenSSL calls the trouble, such as ``KEY_VALUES_MISMATCH``."""
    return str(getattr(error, "reason", None) or error)


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Returns the base URL at which this machine reaches ``sock``, such as ``http://127.0.0.1:8000``."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound to
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` on uvloop, or on asyncio's own loop where there is none."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    keep_collections_short()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda _: None,
    lifecycle: Lifecycle | None = None,
    shutdown_timeout: float = 30.0,
    tls: ssl.SSLContext | None = None,
    half_close_is_hang_up: bool = False,
) -> None:
    """Serves ``app`` until SIGINT, SIGTERM or cancellation, then lets open requests end, and returns.

    Meanwhile new requests are still answered: that the server shuts down. A second signal ends open ones at once.

    The engine is not closed: whoever made it does that next, when no request can reach it any more.

    Args:
        app: the application.
        sock: from :func:`bind`; closed at the end.
        on_ready: called with the base URL once requests are answered.
        lifecycle: of the application; without one, requests that do not end in time are cut off without a word.
        shutdown_timeout: seconds that open requests get to end after the signal; then they are told why they cannot.
        tls: from :func:`tls_context`.
        half_close_is_hang_up: take a client that closes its sending side for one that is gone. For an application that
            may write nothing for a long time after an answer has begun, and must notice who leaves meanwhile.
    """
    config = uvicorn.Config(
        app,
        http=_HangUpProtocol if half_close_is_hang_up else _Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # else whoever connects from this machine says itself who it is
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )
    scheme = "http" if tls is None else "https"
    server = _Server(
        config,
        on_ready=lambda: on_ready(url_of(sock, scheme)),
        lifecycle=lifecycle or Lifecycle(),
        timeout=shutdown_timeout,
    )
    serving = asyncio.create_task(server.serve([sock]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.stop()
        await serving
        raise


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with an end to the request line and headers, of which its parser would keep any amount.

    A client that closes its sending side after its request still gets the answer. TCP shows the same of one that is
    gone, until something is sent to it; so it is sent what HTTP lets a server send at any time and clients pass over,
    an interim response, and one that is gone answers with a reset.
    """

    _in_head = False
    _head_bytes = 0
    _read_bytes = 0
    _half_closed = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                message = f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"
                self._refuse(APIError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[HAS_ROOM] = self._has_room  # type: ignore[literal-required]
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self._in_head = True
        self._expect_head()
        self._head_bytes = -self._read_bytes  # what is read now may be mostly the end of an earlier body

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_here()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            message = f"no whole request line and headers came within {HEAD_SECONDS:g} seconds"
            self._refuse(APIError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to what is no HTTP."""
        self._refuse(APIError(400, msg, code="invalid_http"))

    def _refuse(self, error: APIError) -> None:
        """Answers, unless an answer is under way that this would be taken for a part of, and closes."""
        if self.cycle is None or self.cycle.response_complete:
            body = encode_json(error.body).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Returns whether the connection stays open for an answer to it."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body and not self._in_head
        # TLS ends as a whole; and of HTTP/1.0 no client passes over an interim response.
        if not waits or self.scheme == "https" or self.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        if not self._half_closed:
            self._half_closed = True
            self._probe()
        return True

    def _probe(self) -> None:
        """Finds out, again and again until the answer begins, whether the client is gone. Then writing it tells."""
        if not self.transport.is_closing() and not self.cycle.response_started:
            if not self.pipeline:  # else the answer to an earlier request may be half written
                self.transport.write(INTERIM_RESPONSE)
            self.loop.call_later(PROBE_SECONDS, self._probe)

    def _has_room(self) -> bool:
        return not self.flow.write_paused

    def shutdown(self) -> None:
        """Closes the connection if it is idle, or else after the answer that is under way.

        One whose next request is on its way stays until that has been answered.
        """
        if self.cycle is not None and self.cycle.response_complete and self._in_head:
            return
        if self.cycle is not None:
            super().shutdown()


class _HangUpProtocol(_Protocol):
    """To which a client that sends no more is gone."""

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. The connection is closed."""
        return False


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready, lets requests end, and returns to its caller after a signal.

    uvicorn itself raises the signal again at the end, which would kill the process before the engine is closed; and it
    ends what takes too long by cancelling it, of which clients see a broken connection.
    """

    def __init__(
        self, config: uvicorn.Config, *, on_ready: Callable[[], None], lifecycle: Lifecycle, timeout: float
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._lifecycle = lifecycle
        self._timeout = timeout
        self._hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """The first call lets open requests end; a second one cuts them off."""
        self._hurried = self.should_exit
        self.should_exit = True
        self._lifecycle.drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when no connection and no request is left."""
        self._lifecycle.drain()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._requests_end(self._timeout)
        if self.server_state.tasks:
            logger.warning("%d requests are ended unfinished", len(self._lifecycle.open))
            self._lifecycle.end_all(shutting_down())
            self._hurried = False
            await self._requests_end(LAST_WORDS_SECONDS)
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        await self._close_connections()

    async def _requests_end(self, seconds: float) -> None:
        """Waits until no request is open, at most so long, and not after another signal."""
        deadline = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(POLL_SECONDS)

    async def _close_connections(self) -> None:
        """Sends what is written, for a while; then drops what nobody takes, and cancels what does not end by that."""
        for connection in list(self.server_state.connections):
            connection.transport.close()
        await self._all_gone()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._all_gone()
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._all_gone()

    async def _all_gone(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while (self.server_state.connections or self.server_state.tasks) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self.stop)
        try:
            yield
        finally:
            for signum in SIGNALS:
                loop.remove_signal_handler(signum)
