"""A real Ray cluster of two nodes, both on this machine, and a server whose replicas run there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest
from support.ray_nodes import RayNodes
from support.server import Server, running_server

if find_spec("ray") is None:  # not imported here: see support/ray_nodes.py
    pytest.skip("needs chairlift[cluster]", allow_module_level=True)

ARGUMENTS = (
    "--dtype", "float32", "--served-model-name", "tiny", "--attention-backend", "reference", "--max-num-seqs", "4",
    "--kv-cache-memory-bytes", "4MiB", "--replicas", "2", "--routing", "least-load", "--admin-key", "secret",
)  # fmt: skip
LONG = {"model": "tiny", "prompt": [65], "max_tokens": 500, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 3}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(nodes: RayNodes, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "steps.jsonl"
    with running_server(log, str(tiny_model), *ARGUMENTS, "--cluster", f"ray://{nodes.address}") as server:
        yield server


def complete(server: Server, body: dict) -> httpx.Response:
    return httpx.post(f"{server.api}/completions", json=body, timeout=120)


def scale(server: Server, count: object, key: str = "secret") -> httpx.Response:
    return httpx.post(f"{server.url}/scale", json={"replicas": count}, headers={"X-Admin-Key": key}, timeout=30)


def states(server: Server) -> Counter[str]:
    return Counter(replica["state"] for replica in httpx.get(f"{server.url}/replicas").json()["replicas"])


def wait_for(server: Server, **wanted: int) -> None:
    deadline = time.monotonic() + 60
    while states(server) != Counter(wanted):
        assert time.monotonic() < deadline, (states(server), "".join(server.output))
        time.sleep(0.05)


class Stream:
    """A client that reads a stream to its end: how many tokens came, and the error, if it ended with one."""

    def __init__(self, server: Server) -> None:
        self.tokens = 0
        self.error: dict | None = None
        self.done = False
        self._server = server

    def read(self) -> None:
        body = LONG | {"stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{self._server.api}/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event.get("error", self.error)
                    self.tokens += sum(len(choice["token_ids"]) for choice in event.get("choices", ()))


def test_replicas_share_the_nodes_and_the_work(server: Server):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(server, LONG), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    metrics = server.metrics()
    assert metrics["chairlift:replicas_wanted"] == 2
    for replica in "01":
        assert metrics[f'chairlift:replica_up{{replica="{replica}"}}'] == 1
        assert metrics[f'chairlift:replica_requests_total{{replica="{replica}"}}'] == 2
        assert metrics[f'chairlift:replica_steps_total{{replica="{replica}"}}'] > 499
    raylets = {process.parents()[1].pid for process in psutil.process_iter() if is_engine(process)}
    assert len(raylets) == 2, "each replica has a node of its own"


def is_engine(process: psutil.Process) -> bool:
    """Whether it is the engine of a replica: a child that an actor of Ray's has spawned."""
    try:
        parent = process.parent()
        return parent is not None and "EngineHost" in " ".join(parent.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_a_node_that_is_lost_under_load(server: Server, nodes: RayNodes):
    """What had sent nothing is begun again elsewhere, what had sent tokens hears of it, and the replica comes back."""
    streams = [Stream(server) for _ in range(12)]
    with ThreadPoolExecutor(16) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        whole = [pool.submit(complete, server, LONG) for _ in range(4)]
        while sum(stream.tokens > 20 for stream in streams) < 4:
            time.sleep(0.02)
        nodes.kill()
        for future in reading:
            future.result()
        answers = [future.result() for future in whole]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(answer.json()["usage"]["completion_tokens"] == 500 for answer in answers)
    broken = [stream for stream in streams if stream.error is not None]
    assert 1 <= len(broken) <= 4, "those that ran on the lost node, and no other"
    for stream in broken:
        assert not stream.done
        assert 0 < stream.tokens < 500
        assert stream.error["code"] == "engine_failed"
        assert "was lost" in stream.error["message"]
        assert "after the answer had begun" in stream.error["message"]
    for stream in streams:
        if stream not in broken:
            assert stream.done
            assert stream.tokens == 500
    assert server.metrics()["chairlift:request_retries_total"] >= 1

    assert states(server) == Counter(up=1, placing=1), "no node has room for it"
    assert complete(server, SHORT).status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    nodes.add()
    wait_for(server, up=2)
    assert server.health()["engine_restarts"] == 1
    assert complete(server, SHORT).status_code == 200


def test_going_down_and_up_again_loses_no_request(server: Server):
    going = threading.Event()
    answers: list[int] = []

    def load() -> None:
        while not going.is_set():
            answers.append(complete(server, LONG | {"max_tokens": 60}).status_code)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(6):
            pool.submit(load)
        try:
            for count in (1, 2):
                assert scale(server, count).status_code == 202
                wait_for(server, up=count)
                time.sleep(0.3)
        finally:
            going.set()
    assert len(answers) > 12, answers
    assert set(answers) == {200}
    assert server.metrics()["chairlift:replicas_wanted"] == 2


def test_what_cannot_be_is_refused(server: Server, nodes: RayNodes, tiny_model: Path):
    assert scale(server, 2, key="wrong").status_code == 403
    for count in (0, "2", None, True, 10**9):
        assert scale(server, count).status_code == 400
    assert "have room for 2" in scale(server, 3).json()["error"]["message"]
    for arguments, reason in (
        (("--replicas", "3"), "3 replicas of 1 CPU each do not fit: the cluster's nodes (2 × 1 CPU) have room for 2"),
        (("--num-threads", "2"), "a replica takes 2 CPUs of one node"),
        (("--device", "cuda"), "--device cuda needs GPUs"),
    ):
        command = ("serve", str(tiny_model), "--cluster", nodes.address, "--port", "0", *arguments)
        result = subprocess.run([sys.executable, "-m", "chairlift", *command], capture_output=True, text=True)
        assert result.returncode == 1
        assert reason in result.stderr
    assert states(server) == Counter(up=2)


def test_nothing_of_a_server_that_ends_is_left(server: Server):
    assert any(map(is_engine, psutil.process_iter()))
    server.process.terminate()
    assert server.process.wait(60) == 0, "".join(server.output)
    assert "Traceback" not in "".join(server.output)
    assert not any(map(is_engine, psutil.process_iter()))
