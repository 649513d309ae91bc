"""What the canary router costs: the same load straight to a server, through a bare proxy, and through the router.

    python benchmarks/canary.py --rounds 12

The server is a fake one that sends each token when it is due, and every client waits for its answer before it asks
again. Both are no more than httptools on a transport, since what they take is taken from the proxy: in real life they
run on other machines, but here on the same cores. The bare proxy is twenty lines on the usual libraries (aiohttp and
uvicorn) and does nothing but pass bytes on: what it adds is the price of one more such hop on this machine. The ways
take turns, each with all clients, so that whatever else the machine does hits all. Client, server and proxies are
processes of their own on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httptools
import uvicorn
import uvloop

ROOT = Path(__file__).parents[1]
PIECE = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" token",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class FakeServer(asyncio.Protocol):
    """One connection of a server whose i-th token comes at i times ``token_seconds``."""

    HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    def __init__(self, tokens: int, token_seconds: float) -> None:
        self._tokens, self._token_seconds = tokens, token_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._transport.write(self.HEALTHY)
            return
        self._transport.write(self.HEAD)
        self._start, self._sent = self._loop.time(), 0
        self._wait()

    def _wait(self) -> None:
        self._loop.call_at(self._start + (self._sent + 1) * self._token_seconds, self._send)

    def _send(self) -> None:
        self._transport.write(as_chunk(PIECE))
        self._sent += 1
        if self._sent < self._tokens:
            self._wait()
        else:  # as servers do, in pieces of their own
            self._transport.write(as_chunk(b"data: [DONE]\n\n"))
            self._transport.write(b"0\r\n\r\n")


async def serve(tokens: int, token_seconds: float) -> None:
    """Runs the fake server."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeServer(tokens, token_seconds), "127.0.0.1", 0, backlog=1024)
    print(f"address http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


async def pass_on(upstream: str) -> None:
    """A proxy that does nothing but pass bytes on."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as http:

        async def app(scope: dict, receive: Callable, send: Callable) -> None:
            body = (await receive())["body"]
            async with http.post(upstream + scope["path"], data=body) as response:
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for piece in response.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
            print(f"address http://127.0.0.1:{sock.getsockname()[1]}/v1", flush=True)
            options = {"http": "httptools", "lifespan": "off", "access_log": False, "log_level": "error"}
            await uvicorn.Server(uvicorn.Config(app, **options)).serve([sock])


class Process:
    """A process that says its address, and how much processor time it has had."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CHAIRLIFT_CANARY_KEY": "k"},
            start_new_session=True,  # or Linux schedules all of the benchmark as one against each other session
        )
        for line in self._process.stdout:
            if found := re.search(r"address\s+(http://\S+)/v1", line):
                self.url = found[1]
                return
        raise SystemExit("a process of the benchmark did not start")

    def cpu(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Client(asyncio.Protocol):
    """One connection, on which one request follows the other."""

    def __init__(self, number: int, end: float) -> None:
        body = b'{"model": "m", "prompt": "x", "stream": true}'
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"x-session-id: %d\r\ncontent-length: %d\r\n\r\n%b" % (number, len(body), body)
        )
        self._end = end
        self._parser = httptools.HttpResponseParser(self)
        self.first: list[float] = []
        self.whole: list[float] = []
        self.pieces = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._seen = 0
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._seen:
            self.first.append(time.perf_counter() - self._sent)
        self._seen += data.count(b"data: ")

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        assert self._parser.get_status_code() == 200
        self.whole.append(now - self._sent)
        self.pieces += self._seen - 1
        if now < self._end:
            self.ask()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or time.perf_counter() < self._end:
            self.ended.set_exception(error or ConnectionError("the connection was closed"))
        else:
            self.ended.set_result(None)


async def load(url: str, streams: int, seconds: float) -> dict[str, float]:
    """One round: P50 of TTFT and E2E in ms, and tokens a second."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    end = time.perf_counter() + seconds
    clients = [
        (await loop.create_connection(lambda number=number: Client(number, end), parts.hostname, parts.port))[1]
        for number in range(streams)
    ]
    began = time.perf_counter()
    for number, client in enumerate(clients):
        loop.call_later(0.5 * number / streams, client.ask)  # else all would ask at once, for ever
    await asyncio.gather(*(client.ended for client in clients))
    pieces = sum(client.pieces for client in clients)
    return {
        "ttft": statistics.median(time for client in clients for time in client.first) * 1e3,
        "e2e": statistics.median(time for client in clients for time in client.whole) * 1e3,
        "rate": pieces / (time.perf_counter() - began),
        "pieces": pieces,
    }


async def measure(args: argparse.Namespace, direct: str, proxies: dict[str, Process]) -> None:
    urls = {"direct": direct} | {name: process.url for name, process in proxies.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    for url in urls.values():
        await load(url, args.streams, 1.0)  # code and the proxies' own connections are warm
    for number in range(args.rounds):
        names = list(urls)
        names = names[number % len(names) :] + names[: number % len(names)]
        ways: dict[str, dict[str, float]] = {}
        for name in names:
            before = proxies[name].cpu() if name in proxies else 0.0
            ways[name] = await load(urls[name], args.streams, args.seconds)
            after = proxies[name].cpu() if name in proxies else 0.0
            ways[name]["cpu"] = (after - before) / ways[name]["pieces"] * 1e6
        rounds.append(ways)
    show(args, rounds, list(proxies))


def show(args: argparse.Namespace, rounds: list[dict[str, dict[str, float]]], proxies: list[str]) -> None:
    print(
        f"{args.streams} streams, {args.tokens} tokens of {args.token_ms:g} ms, {len(rounds)} rounds of "
        f"{args.seconds:g} s each way; load average {os.getloadavg()[0]:.1f}\n"
    )
    print(f"{'':20}{'direct':>10}" + "".join(f"{name:>10}   {'difference: median (range)':32}" for name in proxies))
    for key, name, percent in (
        ("ttft", "TTFT, P50 (ms)", False),
        ("e2e", "E2E, P50 (ms)", False),
        ("rate", "tokens/s", True),
    ):
        base = [ways["direct"][key] for ways in rounds]
        line = f"{name:20}{statistics.median(base):10.2f}"
        for proxy in proxies:
            values = [ways[proxy][key] for ways in rounds]
            differences = [(y / x - 1) * 100 if percent else y - x for x, y in zip(base, values, strict=True)]
            spread = f"({min(differences):+.2f} to {max(differences):+.2f})"
            middle = f"{statistics.median(differences):+.2f} {'%' if percent else 'ms'} {spread}"
            line += f"{statistics.median(values):10.2f}   {middle:32}"
        print(line.rstrip())
    costs = (statistics.median(ways[proxy]["cpu"] for ways in rounds) for proxy in proxies)
    print(f"{'CPU (µs/token)':20}{'':10}" + "".join(f"{cost:10.1f}{'':35}" for cost in costs).rstrip())
    client_cpu = resource.getrusage(resource.RUSAGE_SELF)
    print(f"(the client itself took {client_cpu.ru_utime + client_cpu.ru_stime:.1f} s of processor time)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pass-on", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.tokens, args.token_ms / 1e3))
        return
    if args.pass_on:
        uvloop.run(pass_on(args.pass_on))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and let no process live on
    numbers = ("--tokens", str(args.tokens), "--token-ms", str(args.token_ms))
    processes = [Process(__file__, "--serve", *numbers) for _ in range(2)]
    try:
        stable, candidate = (process.url for process in processes)
        gate = "p99_e2e<60m"  # decides nothing: what is measured is the way, and both sides are alike
        options = ("--stable", stable, "--candidate", candidate, "--port", "0", "--no-live", "--steps", "50")
        options += ("--hold", "1h", "--gate", gate, "--connect-timeout", "5m")
        processes.append(Process(__file__, "--pass-on", stable))
        processes.append(Process("-m", "chairlift", "canary", *options))
        uvloop.run(measure(args, stable, {"bare": processes[-2], "router": processes[-1]}))
    finally:
        for process in processes:
            process.stop()


if __name__ == "__main__":
    main()
