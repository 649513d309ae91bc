"""Many requests at once, hang-ups and bad input, on a model that costs next to nothing."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.server import Server, running_server

LONG, SHORT = 400, 8


def complete(server: Server, prompt: list[int], max_tokens: int, **fields) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.api}/completions", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(32, 127) for _ in range(chance.choice((3, 20, 90, 300)))] for _ in range(count)]


def test_64_requests_at_once_of_mixed_length(tiny_model: Path, tmp_path: Path):
    """All answered as they would be alone; the short ones do not wait for the long ones; memory comes back."""
    arguments = ("--dtype", "float32", "--num-threads", "1", "--served-model-name", "tiny", "--max-num-seqs", "64")
    with running_server(tmp_path / "steps.jsonl", str(tiny_model), *arguments) as server:
        work = [(prompt, LONG if i % 2 else SHORT) for i, prompt in enumerate(prompts(64))]
        ended: list[int] = []
        start = threading.Barrier(64)

        def ask(i: int) -> str:
            start.wait()
            answer = complete(server, *work[i])
            ended.append(i)
            assert answer["usage"]["completion_tokens"] == work[i][1]
            return answer["choices"][0]["text"]

        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(ask, range(64)))
        assert [i % 2 for i in ended] == [0] * 32 + [1] * 32, "a short request waited for a long one"
        for i in random.Random(1).sample(range(64), 16):
            assert complete(server, *work[i])["choices"][0]["text"] == together[i]
        server.wait_until_idle()
        records = server.stop()
    assert max(record["running"] for record in records) > 30
    assert records[-1]["blocks_used"] == 0
    assert any(r["rows"]["prefill"] and r["rows"]["decode"] for r in records), "no step mixed prefill and decode"


def test_connections_that_hang_up_leave_nothing_behind(tiny_server: Server):
    """200 clients, streaming and not, that close their socket at a random moment."""
    chance = random.Random(5)
    address = httpx.URL(tiny_server.url)

    def hang_up(i: int) -> None:
        body = json.dumps(
            {"model": "tiny", "prompt": [65] * 50, "max_tokens": 900, "ignore_eos": True, "stream": i % 2 == 0, "n": 2}
        )
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        sent = len(request) if i % 10 else chance.randrange(1, len(request))  # some in the middle of their request
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(request[:sent])
            connection.settimeout(chance.random() * 0.2 + 0.001)
            try:
                while connection.recv(4096):
                    if chance.random() < 0.1:
                        break
            except TimeoutError:
                pass

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(hang_up, range(200)))
    tiny_server.wait_until_idle()
    assert complete(tiny_server, [65, 66, 67], 5)["usage"]["completion_tokens"] == 5


BAD = [
    ("/completions", "{", 400),
    ("/completions", "[]", 400),
    ("/completions", {"model": "other", "prompt": "a"}, 404),
    ("/completions", {"model": "tiny", "prompt": [65] * 2000}, 400),
    ("/completions", {"model": "tiny", "prompt": [65] * 1000, "max_tokens": 100}, 400),
    ("/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400),
    ("/completions", {"model": "tiny", "prompt": "a", "max_tokens": -5}, 400),
    ("/completions", {"model": "tiny", "prompt": "a", "temperature": -1}, 400),
    ("/completions", {"model": "tiny", "prompt": "a", "temperature": "hot"}, 400),
    ("/completions", {"model": "tiny", "prompt": [1, 99999]}, 400),
    ("/completions", {"model": "tiny", "prompt": [1, -1]}, 400),
    ("/completions", {"model": "tiny", "prompt": ""}, 400),
    ("/completions", {"model": "tiny", "prompt": []}, 400),
    ("/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}, 400),
    ("/completions", {"model": "tiny", "prompt": "a" * 10_000_000}, 413),
    ("/completions", '{"model": "tiny", "prompt": "\\ud800"}', 400),
    ("/completions", "[" * 100_000, 400),
    ("/chat/completions", {"model": "tiny", "messages": []}, 400),
    ("/chat/completions", {"model": "tiny", "messages": [{"role": "user"}]}, 400),
    ("/chat/completions", {"model": "tiny", "messages": "hello"}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD, ids=range(len(BAD)))
def test_bad_input_gets_an_openai_error_and_the_next_good_request_works(
    tiny_server: Server, path: str, body: object, status: int
):
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{tiny_server.api}{path}", content=content, headers=headers, timeout=60)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert complete(tiny_server, [65, 66], 3)["usage"]["completion_tokens"] == 3


def test_static_batching_serves_the_same_tokens(tiny_model: Path, tiny_server: Server, tmp_path: Path):
    arguments = (
        "--dtype",
        "float32",
        "--served-model-name",
        "tiny",
        "--batching",
        "static",
        "--static-batch-size",
        "4",
    )
    work = list(zip(prompts(8, seed=3), (5, 40, 12, 3, 9, 9, 30, 1), strict=True))
    with running_server(tmp_path / "steps.jsonl", str(tiny_model), *arguments) as static, ThreadPoolExecutor(8) as pool:
        static_texts = list(pool.map(lambda job: complete(static, *job)["choices"][0]["text"], work))
        continuous_texts = list(pool.map(lambda job: complete(tiny_server, *job)["choices"][0]["text"], work))
        records = static.stop()
    assert sum(record["rows"]["ended"] for record in records) > 0
    assert sum(record["rows"]["padding"] for record in records) > 0
    assert static_texts == continuous_texts


def test_the_command_line_that_teams_have_works_as_written(tiny_model: Path, tmp_path: Path):
    """Flags as teams have them in their scripts, for a model of 8,192 tokens."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    flags = (
        "--tensor-parallel-size 1 --gpu-memory-utilization 0.90 --max-num-seqs 32 --max-model-len 4096 --swap-space 16 "
        "--enforce-eager"
    )
    with running_server(tmp_path / "steps.jsonl", "--model", str(model), *flags.split()) as server:
        assert "4,096 tokens" in "".join(server.output)
        body = {"model": str(model), "prompt": [65, 66, 67], "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{server.api}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
