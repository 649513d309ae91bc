"""An engine process that hangs or is killed under its server."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from support.server import Server, running_server

ARGUMENTS = ("--dtype", "float32", "--served-model-name", "tiny", "--num-threads", "1", "--step-timeout", "1")
LONG = {"model": "tiny", "prompt": [65], "max_tokens": 1000, "ignore_eos": True}


def engine_pid(server: Server) -> int:
    children = psutil.Process(server.process.pid).children()
    [engine] = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return engine.pid


def health_once(server: Server, status: str) -> httpx.Response:
    deadline = time.monotonic() + 60
    while (response := httpx.get(f"{server.url}/health", timeout=30)).json()["status"] != status:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.1)
    return response


def test_an_engine_that_hangs_and_then_is_killed(tiny_model: Path, tmp_path: Path):
    """Whatever is sent to it, the server goes on to answer; when it dies, everybody is told."""
    with running_server(tmp_path / "steps.jsonl", str(tiny_model), *ARGUMENTS) as server, ThreadPoolExecutor(4) as pool:
        engine = engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        more_than_a_pipe_holds = {"model": "tiny", "prompt": [[65] * 1000] * 25, "n": 8, "max_tokens": 1}
        answer = pool.submit(httpx.post, f"{server.api}/completions", json=more_than_a_pipe_holds, timeout=120)
        assert health_once(server, "wedged").status_code == 503
        os.kill(engine, signal.SIGCONT)
        assert len(answer.result().json()["choices"]) == 200
        assert health_once(server, "ok").status_code == 200

        begun = threading.Event()

        def stream() -> str:
            text = ""
            with httpx.stream(
                "POST", f"{server.api}/completions", json=LONG | {"stream": True}, timeout=60
            ) as response:
                for piece in response.iter_text():
                    text += piece
                    begun.set()
            return text

        whole = pool.submit(httpx.post, f"{server.api}/completions", json=LONG, timeout=60)
        streamed = pool.submit(stream)
        assert begun.wait(60)
        os.kill(engine, signal.SIGKILL)
        assert whole.result().status_code == 503
        assert "the engine process ended (signal 9)" in streamed.result().splitlines()[-2]
        assert health_once(server, "dead").status_code == 503
        assert httpx.post(f"{server.api}/completions", json=LONG).json()["error"]["code"] == "engine_failed"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
