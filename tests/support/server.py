"""A ``chairlift serve`` process, and what can be asked of it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

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

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health").json()

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name and labels, without the model's name."""
        text = httpx.get(f"{self.url}/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {re.sub(r',?model_name="[^"]*"', "", name).replace("{}", ""): float(value) for name, value in lines}

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
def running_server(log: Path, *arguments: str) -> Iterator[Server]:
    """Starts ``chairlift serve`` on a free port and waits until it says it is ready."""
    command = [sys.executable, "-m", "chairlift", "serve", *arguments, "--port", "0", "--step-log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output: list[str] = []
    try:
        deadline = time.monotonic() + START_TIMEOUT
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            address = re.search(r"address\s+(http://\S+)/v1", line)
            if address:
                break
            assert time.monotonic() < deadline, "".join(output)
        else:
            raise AssertionError(f"the server ended: {''.join(output)}")
        yield Server(address[1], process, output, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
