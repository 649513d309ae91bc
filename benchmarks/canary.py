"""What the canary router costs: the same load straight to a server and through the router, in turn.

    python benchmarks/canary.py --rounds 12

The server is a fake one that sends each token when it is due, so that it costs next to nothing itself; every client
waits for its answer before it asks again. Direct and routed rounds alternate, each with all clients, so that whatever
else the machine does hits both. Client, server and router are processes of their own on one machine: what the client
and the server take is taken from the router too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import uvloop

ROOT = Path(__file__).parents[1]
PIECE = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" token",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


async def serve(tokens: int, token_seconds: float) -> None:
    """A server whose i-th token comes at i times ``token_seconds``."""
    from aiohttp import web

    async def complete(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        start = loop.time()
        for i in range(1, tokens + 1):
            await asyncio.sleep(max(0.0, start + i * token_seconds - loop.time()))
            await response.write(PIECE)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"address http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


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


async def load(http: aiohttp.ClientSession, url: str, streams: int, seconds: float) -> dict[str, float]:
    """One round: P50 of TTFT and E2E in ms, and tokens a second."""
    first: list[float] = []
    whole: list[float] = []
    pieces = 0
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal pieces
        await asyncio.sleep(0.5 * number / streams)  # else all would ask at once, for ever
        while time.perf_counter() < end:
            sent = time.perf_counter()
            body = {"model": "m", "prompt": "x", "stream": True}
            headers = {"X-Session-Id": f"{number}"}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                seen = 0
                async for chunk in response.content.iter_any():
                    if not seen:
                        first.append(time.perf_counter() - sent)
                    seen += chunk.count(b"data: ")
            assert response.status == 200
            whole.append(time.perf_counter() - sent)
            pieces += seen - 1

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(streams)))
    return {
        "ttft": statistics.median(first) * 1e3,
        "e2e": statistics.median(whole) * 1e3,
        "rate": pieces / (time.perf_counter() - began),
        "pieces": pieces,
    }


async def measure(args: argparse.Namespace, direct: str, router: Process) -> None:
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    router_cpu = 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for url in (direct, router.url):
            await load(http, url, args.streams, 1.0)  # connections and code are warm
        for number in range(args.rounds):
            pair: dict[bool, dict[str, float]] = {}
            for routed in (False, True) if number % 2 else (True, False):
                before = router.cpu()
                pair[routed] = await load(http, router.url if routed else direct, args.streams, args.seconds)
                if routed:
                    router_cpu += router.cpu() - before
            rounds.append((pair[False], pair[True]))
    show(args, rounds, router_cpu)


def show(args: argparse.Namespace, rounds: list[tuple[dict[str, float], dict[str, float]]], router_cpu: float) -> None:
    print(
        f"{args.streams} streams, {args.tokens} tokens of {args.token_ms:g} ms, {len(rounds)} rounds of "
        f"{args.seconds:g} s each way; load average {os.getloadavg()[0]:.1f}\n"
    )
    print(f"{'':24}{'direct':>10}{'routed':>10}   difference: median (range)")
    for key, name, percent in (
        ("ttft", "TTFT, P50 (ms)", False),
        ("e2e", "E2E, P50 (ms)", False),
        ("rate", "tokens/s", True),
    ):
        a, b = ([side[key] for side in sides] for sides in zip(*rounds, strict=True))
        differences = [(y / x - 1) * 100 if percent else y - x for x, y in zip(a, b, strict=True)]
        unit = "%" if percent else "ms"
        middle = f"{statistics.median(differences):+.2f} {unit}"
        spread = f"({min(differences):+.2f} to {max(differences):+.2f})"
        print(f"{name:24}{statistics.median(a):10.2f}{statistics.median(b):10.2f}   {middle} {spread}")
    pieces = sum(routed["pieces"] for _, routed in rounds)
    print(f"{'router CPU (µs/token)':24}{'':10}{router_cpu / pieces * 1e6:10.1f}")
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
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.tokens, args.token_ms / 1e3))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and let no process live on
    numbers = ("--tokens", str(args.tokens), "--token-ms", str(args.token_ms))
    processes = [Process(__file__, "--serve", *numbers) for _ in range(2)]
    try:
        stable, candidate = (process.url for process in processes)
        gate = "p99_e2e<60m"  # decides nothing: what is measured is the way, and both sides are alike
        options = ("--stable", stable, "--candidate", candidate, "--port", "0", "--no-live", "--steps", "50")
        options += ("--hold", "1h", "--gate", gate, "--connect-timeout", "5m")
        processes.append(Process("-m", "chairlift", "canary", *options))
        uvloop.run(measure(args, stable, processes[-1]))
    finally:
        for process in processes:
            process.stop()


if __name__ == "__main__":
    main()
