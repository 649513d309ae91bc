"""What serving costs: as many streaming clients as requests against the same requests handed to ``LLM.generate``.

    python benchmarks/served.py                         # five rounds in bf16, some three minutes
    python benchmarks/served.py --dtype float32 --rounds 3 --limit 16

Both run in turn, the server and the offline engine each in a process group of its own that is stopped (SIGSTOP) while
the other is measured; the order changes every round, and ratios are taken round by round. All requests
(benchmarks/data/requests.json) begin at once, greedy, with outputs of exact length. The client is this process: one
thread on bare sockets that counts events as they come. It shares the cores with the server, as it must on one machine;
what it and the server's own process compute is printed, since on a machine that is busy computing that is what is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

import chairlift
from chairlift import LLM, SamplingParams

REQUESTS = Path(__file__).resolve().parent / "data" / "requests.json"
HOST = "127.0.0.1"
START_TIMEOUT = 300.0
SETTLE_SECONDS = 0.3
EVENT, DONE = b"data: {", b"data: [DONE]"

Request = dict[str, Any]


def offline(arguments: argparse.Namespace, requests: Sequence[Request]) -> None:
    """The engine without a server, in a process of its own: a run for each line that comes, answered by its seconds."""
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        max_num_seqs=arguments.max_num_seqs,
        enable_prefix_caching=False,
    )
    params = [SamplingParams(max_tokens=r["out"], temperature=0, ignore_eos=True) for r in requests]
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = llm.generate([request["prompt"] for request in requests], params)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == [request["out"] for request in requests]
        print(seconds, flush=True)


class Group:
    """A process and all that it starts, which can be stopped."""

    def __init__(self, command: Sequence[str], **pipes: Any) -> None:
        self.process = subprocess.Popen(command, start_new_session=True, **pipes)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


class Offline(Group):
    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(
            [sys.executable, __file__, "--offline", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        if not line:
            raise SystemExit("the offline engine ended")
        return line

    def run(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())


class Server(Group):
    def __init__(self, arguments: argparse.Namespace, log: IO[bytes]) -> None:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            self.port = int(listener.getsockname()[1])
        flags = ["--dtype", arguments.dtype, "--max-num-seqs", str(arguments.max_num_seqs), "--port", str(self.port)]
        if arguments.quantization:
            flags += ["--quantization", arguments.quantization]
        command = [sys.executable, "-m", "chairlift", "serve", arguments.model, "--no-enable-prefix-caching", *flags]
        super().__init__([*command, "--served-model-name", "model"], stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')[-500:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def cpu_seconds(self) -> float:
        """What the server's own process has computed, without its engine."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def run(self, requests: Sequence[Request]) -> tuple[float, int]:
        """Seconds from the first byte that is sent to the last that comes, and how many events came."""
        heads = [_post(self.port, request) for request in requests]
        selector = selectors.DefaultSelector()
        answers: dict[socket.socket, list[bytes]] = {}
        started = time.perf_counter()
        for head in heads:
            sock = socket.create_connection((HOST, self.port))
            sock.sendall(head)
            answers[sock] = []
            selector.register(sock, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                ready: Any = key.fileobj
                if piece := ready.recv(1 << 16):
                    answers[ready].append(piece)
                else:
                    selector.unregister(ready)
                    ready.close()
        seconds = time.perf_counter() - started
        bodies = [b"".join(pieces) for pieces in answers.values()]
        for body in bodies:
            if not body.startswith(b"HTTP/1.1 200") or DONE not in body:
                raise SystemExit(f"an answer is not whole: {body[:300]!r} … {body[-300:]!r}")
        return seconds, sum(body.count(EVENT) for body in bodies)


def _post(port: int, request: Request) -> bytes:
    body = json.dumps(
        {
            "model": "model",
            "prompt": request["prompt"],
            "max_tokens": request["out"],
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", default=None, choices=("int8",))
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--limit", type=int, default=None, help="use the first N requests only")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    requests: list[Request] = json.loads(REQUESTS.read_text())["reqs"][: arguments.limit]
    if arguments.offline:
        offline(arguments, requests)
        return
    with tempfile.TemporaryFile() as log:
        alone = Offline(sys.argv[1:])
        alone.signal(signal.SIGSTOP)
        try:
            server = Server(arguments, log)
            server.signal(signal.SIGSTOP)
            try:
                measure(arguments, requests, alone, server)
            finally:
                server.end()
        finally:
            alone.end()


def measure(arguments: argparse.Namespace, requests: Sequence[Request], alone: Offline, server: Server) -> None:
    tokens = sum(len(request["prompt"]) + request["out"] for request in requests)
    precision = arguments.quantization or arguments.dtype
    print(f"chairlift {chairlift.__version__}, {arguments.model}, {precision}, {len(os.sched_getaffinity(0))} cores")
    print(f"{len(requests)} requests at once, {tokens:,} tokens, {sum(r['out'] for r in requests):,} of them generated")
    seconds: dict[str, list[float]] = {"offline": [], "served": []}
    for number in range(arguments.rounds + 1):
        done: dict[str, float] = {}
        for which in sorted(seconds, reverse=number % 2 == 1):
            group = alone if which == "offline" else server
            group.signal(signal.SIGCONT)
            time.sleep(SETTLE_SECONDS)
            if which == "offline":
                done[which] = alone.run()
            else:
                serving, asking = server.cpu_seconds(), time.process_time()
                done[which], events = server.run(requests)
                serving, asking = server.cpu_seconds() - serving, time.process_time() - asking
            group.signal(signal.SIGSTOP)
        print(
            f"{'warm-up' if not number else f'round {number}'}: offline {done['offline']:.2f} s, served "
            f"{done['served']:.2f} s, {events} events; the server's process computed {serving:.2f} s, the client "
            f"{asking:.2f} s",
            flush=True,
        )
        for which in seconds if number else ():
            seconds[which].append(done[which])
    for which, times in seconds.items():
        print(f"{which}: {spread(times)} s, {spread([tokens / t for t in times], 0)} tokens/s")
    ratios = [a / b for a, b in zip(seconds["offline"], seconds["served"], strict=True)]
    print(f"served against offline, round by round: {spread([100 * ratio for ratio in ratios], 1)} %")


if __name__ == "__main__":
    main()
