"""Engines that are killed or hang under their server, and servers that are killed above their engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from support.server import Server, running_server

# The reference backend has nothing to compile: engines are started again and again here.
ARGUMENTS = (
    "--dtype", "float32", "--served-model-name", "tiny", "--num-threads", "1", "--attention-backend", "reference",
)  # fmt: skip
LONG = {"model": "tiny", "prompt": [65], "max_tokens": 1000, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 3}
SECONDS_TO_TELL = 2.0
SLACK = 8.0  # for a machine that is busy with other things


class Streams:
    """Clients with a stream each, and when they heard what."""

    def __init__(self, server: Server, count: int, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self._begun = threading.Semaphore(0)
        self.answers: list[Future[tuple[str, float]]] = [pool.submit(self._read) for _ in range(count)]

    def _read(self) -> tuple[str, float]:
        """The whole stream, and when it ended."""
        text = ""
        body = LONG | {"stream": True}
        with httpx.stream("POST", f"{self._server.api}/completions", json=body, timeout=120) as response:
            for piece in response.iter_text():
                if not text:
                    self._begun.release()
                text += piece
        return text, time.monotonic()

    def wait_until_begun(self) -> None:
        """Waits until each has its first token."""
        for _ in self.answers:
            assert self._begun.acquire(timeout=60)


def last_error(stream: str) -> dict:
    return json.loads(stream.strip().splitlines()[-1].removeprefix("data: "))["error"]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_an_engine_that_is_killed_with_32_streams_open(tiny_model: Path, tmp_path: Path):
    """Every client hears of it; the server says that it is alive and not ready, and soon answers again by itself."""
    arguments = (*ARGUMENTS, "--max-num-seqs", "64")
    with running_server(tmp_path / "steps", str(tiny_model), *arguments) as server, ThreadPoolExecutor(33) as pool:
        streams = Streams(server, 32, pool)
        whole = pool.submit(httpx.post, f"{server.api}/completions", json=LONG, timeout=120)
        streams.wait_until_begun()
        first = server.engine_pid
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        for answer in streams.answers:
            text, ended = answer.result(60)
            assert last_error(text)["code"] == "engine_failed"
            assert "the engine process ended (signal 9)" in last_error(text)["message"]
            assert ended - killed < SECONDS_TO_TELL + SLACK
        assert whole.result().status_code == 503
        assert whole.result().headers["retry-after"]

        health = server.wait_until("restarting")
        assert health.status_code == 200
        assert health.json()["last_failure"] == "the engine process ended (signal 9)"
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503
        assert int(ready.headers["retry-after"]) >= 1
        refused = httpx.post(f"{server.api}/completions", json=SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "another engine is being started" in refused.json()["error"]["message"]
        metrics = server.metrics()
        assert metrics["chairlift:engine_up"] == 0
        assert metrics["chairlift:kv_cache_usage_perc"] == metrics["chairlift:num_requests_running"] == 0

        assert server.wait_until("ok").json()["engine_restarts"] == 1
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert httpx.post(f"{server.api}/completions", json=SHORT, timeout=60).status_code == 200
        assert server.engine_pid != first
        assert gone(first)
        metrics = server.metrics()
        assert metrics["chairlift:engine_restarts_total"] == metrics["chairlift:engine_up"] == 1
        assert metrics['chairlift:request_success_total{finished_reason="error"}'] >= 33
        assert len(server.log_lines("the engine failed after")) == 1
        server.wait_until_idle()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_an_engine_that_hangs_is_killed_and_replaced(tiny_model: Path, tmp_path: Path):
    """Whatever is sent to it, even more than a pipe holds, the server goes on to answer."""
    arguments = (*ARGUMENTS, "--step-timeout", "2")
    with running_server(tmp_path / "steps", str(tiny_model), *arguments) as server, ThreadPoolExecutor(4) as pool:
        streams = Streams(server, 1, pool)
        streams.wait_until_begun()
        hanging = server.engine_pid
        os.kill(hanging, signal.SIGSTOP)
        more_than_a_pipe_holds = {"model": "tiny", "prompt": [[65] * 1000] * 25, "n": 8, "max_tokens": 1}
        answer = pool.submit(httpx.post, f"{server.api}/completions", json=more_than_a_pipe_holds, timeout=120)
        assert "--step-timeout" in last_error(streams.answers[0].result(60)[0])["message"]
        assert answer.result().status_code == 503
        assert server.wait_until("ok").json()["engine_restarts"] == 1
        assert gone(hanging)
        assert httpx.post(f"{server.api}/completions", json=SHORT, timeout=60).status_code == 200


def test_an_engine_that_cannot_be_started_again_is_tried_ever_more_rarely(tiny_model: Path, tmp_path: Path):
    """Its model is gone: nothing that a restart would mend, until somebody puts it back."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    with running_server(tmp_path / "steps", str(model), *ARGUMENTS) as server:
        (model / "config.json").rename(model / "away")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert "config.json" in server.log_lines("the engine could not be started")[0]
        assert "attempt 2" in server.log_lines("starting another engine", 2)[1]
        assert "config.json" in httpx.get(f"{server.url}/health").json()["last_failure"]
        (model / "away").rename(model / "config.json")
        assert server.wait_until("ok").json()["engine_restarts"] == 1


def test_an_engine_does_not_outlive_a_server_that_is_killed(tiny_model: Path, tmp_path: Path):
    """Not even one that hangs, and so cannot notice by itself."""
    with running_server(tmp_path / "steps", str(tiny_model), *ARGUMENTS) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        assert eventually(lambda: gone(engine))


def test_a_server_that_ends_while_its_engine_is_restarted_leaves_nothing(tiny_model: Path, tmp_path: Path):
    with running_server(tmp_path / "steps", str(tiny_model), *ARGUMENTS) as server:
        family = psutil.Process(server.process.pid)
        os.kill(server.engine_pid, signal.SIGKILL)
        server.log_lines("starting another engine")
        assert eventually(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in family.children()))
        children = [child.pid for child in family.children()]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert all(eventually(lambda pid=pid: gone(pid)) for pid in children)
        assert "Traceback" not in "".join(server.output)


def test_an_engine_that_dies_while_its_server_shuts_down_is_not_replaced(tiny_model: Path, tmp_path: Path):
    with running_server(tmp_path / "steps", str(tiny_model), *ARGUMENTS) as server, ThreadPoolExecutor(1) as pool:
        streams = Streams(server, 1, pool)
        streams.wait_until_begun()
        os.kill(server.engine_pid, signal.SIGSTOP)  # so that the stream stays open
        server.process.send_signal(signal.SIGTERM)
        server.wait_until("draining")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert last_error(streams.answers[0].result(60)[0])["code"] == "engine_failed"
        assert server.process.wait(30) == 0
        assert "starting another engine" not in "".join(server.output)
