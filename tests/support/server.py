"""A ``chairlift serve`` process, and what can be asked of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_TIMEOUT = 120.0


@dataclass
class Server:
    """A ``chairlift serve`` process."""

    url: str
    process: subprocess.Popen[str]
    output: list[str]
    step_log: Path

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def engine_pid(self) -> int:
        """The process id of the engine, which is the child that multiprocessing spawned last."""
        children = psutil.Process(self.process.pid).children()
        engines = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        return max(engines, key=psutil.Process.create_time).pid

    def wait_until(self, status: str, seconds: float = 60.0) -> httpx.Response:
        """The answer of /health once it shows this status."""
        deadline = time.monotonic() + seconds
        while (response := httpx.get(f"{self.url}/health", timeout=30)).json()["status"] != status:
            assert time.monotonic() < deadline, response.text
            time.sleep(0.05)
        return response

    def log_lines(self, text: str, count: int = 1, seconds: float = 30.0) -> list[str]:
        """The lines of output that have this text, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(lines := [line for line in self.output if text in line]) < count:
            assert time.monotonic() < deadline, "".join(self.output)
            time.sleep(0.02)
        return lines

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health").json()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name and labels, without the model's name."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        names = ((re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{"), value) for name, value in lines)
        return {name.replace("{}", ""): float(value) for name, value in names}

    def wait_until_idle(self, seconds: float = 30.0) -> dict:
        """The health once nothing runs or waits and no block is owned."""
        deadline = time.monotonic() + seconds
        while True:
            health = self.health()
            if not (health["running"] or health["waiting"] or health["kv_cache_usage"]):
                return health
            assert time.monotonic() < deadline, f"not idle after {seconds} s: {health}"
            time.sleep(0.05)

    def stop(self) -> list[dict]:
        """Ends the server as a supervisor would, and returns its step records."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, "".join(self.output)
        return [json.loads(line) for line in self.step_log.read_text().splitlines()]


@contextlib.contextmanager
def running_server(log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Starts ``chairlift serve`` on a free port and waits until it says it is ready. Its output is read to the end."""
    command = [sys.executable, "-m", "chairlift", "serve", *arguments, "--port", "0", "--step-log", str(log)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (env or {})
    )
    output: list[str] = []
    reader: threading.Thread | None = None
    try:
        deadline = time.monotonic() + START_TIMEOUT
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            address = re.search(r"address\W+(https?://\S+)/v1", line)
            if address:
                break
            assert time.monotonic() < deadline, "".join(output)
        else:
            raise AssertionError(f"the server ended: {''.join(output)}")
        reader = threading.Thread(target=lambda lines=process.stdout: [output.append(line) for line in lines])
        reader.start()
        yield Server(address[1], process, output, log)
    finally:
        process.kill()
        process.wait()
        if reader is not None:
            reader.join()  # ends when the engine has ended too
        process.stdout.close()
