"""Runs an application under uvicorn, on a socket that is bound before anything slow begins."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 2048
MAX_HEAD_BYTES = 64 * 1024
"""Most that a request may have before its body, give or take one read of the socket."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the usual idle limit of clients and proxies, so that it is they who close idle connections: a server
that closes first does so, now and then, just as a request arrives."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")


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


def url_of(sock: socket.socket) -> str:
    """Returns the base URL at which this machine reaches ``sock``, such as ``http://127.0.0.1:8000``."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared with, not bound to
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` on uvloop, or on asyncio's own loop where there is none."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda _: None,
    shutdown_timeout: int = 30,
    access_log: bool = False,
) -> None:
    """Serves ``app`` until SIGINT, SIGTERM or cancellation, then lets open responses end, and returns.

    A second signal cuts them off.

    The engine is not closed: whoever made it does that next, when no request can reach it any more.

    Args:
        app: the application.
        sock: from :func:`bind`; closed at the end.
        on_ready: called with the base URL once requests are answered.
        shutdown_timeout: seconds that open responses get to end after the signal; then they are cut off.
        access_log: log a line for each request.
    """
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    server = _Server(config, on_ready=lambda: on_ready(url_of(sock)))
    serving = asyncio.create_task(server.serve([sock]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with an end to the request line and headers, of which its parser would keep any amount."""

    _in_head = False
    _head_bytes = 0
    _read_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = -self._read_bytes  # what is read now may be mostly the end of an earlier body

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready, and returns to its caller after a signal.

    uvicorn itself raises the signal again at the end, which would kill the process before the engine is closed.
    """

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def _on_signal(self) -> None:
        """The first signal lets open responses end; a second one, whichever it is, cuts them off."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self._on_signal)
        try:
            yield
        finally:
            for signum in SIGNALS:
                loop.remove_signal_handler(signum)
