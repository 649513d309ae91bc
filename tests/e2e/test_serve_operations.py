"""A server as it is operated: more load than it takes, stopped in the middle of its work, behind keys and TLS."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import trustme
from support.server import Server, running_server

ARGUMENTS = (
    "--dtype", "float32", "--served-model-name", "tiny", "--num-threads", "1", "--attention-backend", "reference",
)  # fmt: skip
BODY = {"model": "tiny", "prompt": [65] * 20, "max_tokens": 4, "ignore_eos": True}
PLACES, QUEUED = 8, 8
CLIENTS = 4 * (PLACES + QUEUED)
MIB = 1024**2


def memory(server: Server) -> int:
    """Bytes that the server and its engine hold."""
    return sum(psutil.Process(pid).memory_info().rss for pid in (server.process.pid, server.engine_pid))


def load(server: Server, requests: int) -> Counter[int]:
    """Sends so many requests by clients that all wait at once; returns how often each status came."""
    statuses: Counter[int] = Counter()
    left = iter(range(requests))
    lock = threading.Lock()

    def client(seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(timeout=120) as http:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                stream = chance.random() < 0.5
                response = http.post(f"{server.api}/completions", json=BODY | {"stream": stream})
                if response.status_code == 429:
                    assert response.headers["retry-after"]
                    assert response.json()["error"]["code"] == "queue_full"
                elif stream:
                    assert response.text.endswith("data: [DONE]\n\n")
                else:
                    assert response.json()["usage"]["completion_tokens"] == 4
                with lock:
                    statuses[response.status_code] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return statuses


def test_four_times_the_load_it_takes_and_then_a_shutdown(tiny_model: Path, tmp_path: Path):
    arguments = (*ARGUMENTS, "--max-num-seqs", str(PLACES), "--max-num-queued-reqs", str(QUEUED))
    with running_server(tmp_path / "steps", str(tiny_model), *arguments) as server:
        load(server, 300)  # whatever is made once is made
        before = memory(server)
        statuses = load(server, 1000)
        assert set(statuses) == {200, 429}
        assert statuses.total() == 1000
        assert memory(server) - before < 24 * MIB
        server.wait_until_idle()
        metrics = server.metrics()
        refused = 'chairlift:http_requests_total{handler="/v1/completions",method="POST",status="429"}'
        assert metrics[refused] >= statuses[429]
        answer_to_a_half_closed_socket(server)
        shut_down_with_open_streams(server)


def answer_to_a_half_closed_socket(server: Server) -> None:
    content = json.dumps(BODY | {"max_tokens": 200}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + content)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"HTTP/1.1 200 OK" in answer
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 200


def shut_down_with_open_streams(server: Server) -> None:
    """One that is short enough ends as always; of a long one the second signal makes an error."""
    begun = threading.Semaphore(0)

    def stream(max_tokens: int) -> str:
        text = ""
        body = BODY | {"stream": True, "max_tokens": max_tokens, "n": 4}
        with httpx.stream("POST", f"{server.api}/completions", json=body, timeout=120) as response:
            for piece in response.iter_text():
                if not text:
                    begun.release()
                text += piece
        return text

    with ThreadPoolExecutor(2) as pool, httpx.Client() as idle:
        assert idle.get(f"{server.url}/ready").status_code == 200
        long, short = pool.submit(stream, 1000), pool.submit(stream, 30)
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)
        os.kill(server.engine_pid, signal.SIGSTOP)  # until the looks at the server are over
        server.process.send_signal(signal.SIGTERM)
        server.log_lines("no more requests are taken")
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = httpx.post(f"{server.api}/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        os.kill(server.engine_pid, signal.SIGCONT)
        assert short.result().endswith("data: [DONE]\n\n")
        if not long.done():
            server.process.send_signal(signal.SIGTERM)
        last = long.result().strip().splitlines()[-1].removeprefix("data: ")
        assert last == "[DONE]" or json.loads(last)["error"]["code"] == "shutting_down"
        assert server.process.wait(30) == 0
    assert "Traceback" not in "".join(server.output)


def test_keys_tls_and_lines_for_machines(tiny_model: Path, tmp_path: Path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    arguments = (
        *ARGUMENTS, "--ssl-keyfile", str(tmp_path / "key.pem"), "--ssl-certfile", str(tmp_path / "cert.pem"),
        "--api-key", "mine", "--log-format", "json", "--enable-log-requests", "--root-path", "/llm",
    )  # fmt: skip
    with running_server(tmp_path / "steps", str(tiny_model), *arguments) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json=BODY).status_code == 401
            headers = {"authorization": "Bearer mine", "x-request-id": "the-label"}
            assert client.post("/llm/v1/completions", json=BODY | {"n": 2}, headers=headers).status_code == 200
        [line] = [json.loads(line) for line in server.log_lines("the-label")]
        assert line.pop("time").endswith("Z")
        times = {name: line.pop(name) for name in list(line) if name.endswith("seconds")}
        assert line == {
            "level": "info", "process": "server", "logger": "chairlift.request", "message": "request",
            "request_id": "the-label", "method": "POST", "path": "/v1/completions", "status": 200, "stream": False,
            "sequences": 2, "prompt_tokens": 40, "cached_tokens": line["cached_tokens"], "completion_tokens": 8,
            "preemptions": 0, "finish_reasons": ["length"],
        }  # fmt: skip
        assert set(times) == {
            "seconds", "queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds",
        }  # fmt: skip
        assert times["seconds"] >= times["time_to_first_token_seconds"] > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for line in server.output:
            assert json.loads(line)["process"] in ("server", "engine")
