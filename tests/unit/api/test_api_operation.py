"""Health, models, metrics, request ids, and what clients see of an engine that fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from chairlift.engine.client import EngineStats

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/completions", HI), ("/v1/chat/completions", CHAT)])


async def test_models(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [(model["id"], model["object"], model["max_model_len"]) for model in answer["data"]] == [
        ("tiny", "model", 128),
        ("org/tiny", "model", 128),
    ]


async def test_health(client: httpx.AsyncClient, engine: Any) -> None:
    engine.health = EngineStats(running=3, waiting=2, swapped=1, kv_cache_usage=0.25, last_step_age=1.23456)
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok", "last_step_age_s": 1.235, "running": 3, "waiting": 2, "swapped": 1, "kv_cache_usage": 0.25,
        "open_requests": 0, "engine_restarts": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stats", "status"), [(EngineStats(alive=False), "dead"), (EngineStats(wedged=True, has_work=True), "wedged")]
)
async def test_health_of_an_engine_that_cannot_answer(
    client: httpx.AsyncClient, engine: Any, stats: EngineStats, status: str
) -> None:
    engine.health = stats
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == status


async def test_version_and_root(client: httpx.AsyncClient) -> None:
    version = (await client.get("/version")).json()["version"]
    assert (await client.get("/")).json() == {"name": "chairlift", "version": version, "models": ["tiny", "org/tiny"]}


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    pairs = ",".join(f'{label}="{value}"' for label, value in sorted({**labels, "model_name": "tiny"}.items()))
    wanted = f"chairlift:{name}{{{pairs}}} "
    [value] = [line.removeprefix(wanted) for line in response.text.splitlines() if line.startswith(wanted)]
    return float(value)


async def test_metrics_of_requests(client: httpx.AsyncClient) -> None:
    for body in (HI, HI | {"max_tokens": 5, "n": 2}, HI | {"stop": "lo w", "stream": True}, CHAT):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert (await client.post(path, json=body)).status_code == 200
    assert await metric(client, "request_success_total", finished_reason="stop") == 3
    assert await metric(client, "request_success_total", finished_reason="length") == 2
    assert await metric(client, "request_success_total", finished_reason="abort") == 0
    assert await metric(client, "generation_tokens_total") == 12 + 2 * 5 + 7 + 12
    assert await metric(client, "prompt_tokens_total") == 2 + 2 * 2 + 2 + 20
    assert await metric(client, "time_to_first_token_seconds_count") == 5
    assert await metric(client, "inter_token_latency_seconds_count") == 11 + 2 * 4 + 6 + 11
    assert await metric(client, "request_time_per_output_token_seconds_count") == 5
    assert await metric(client, "e2e_request_latency_seconds_count") == 5
    assert await metric(client, "request_queue_time_seconds_count") == 5
    assert await metric(client, "request_queue_time_seconds_sum") == 5 * 0.5
    assert await metric(client, "request_prompt_tokens_sum") == 28
    assert await metric(client, "request_generation_tokens_sum") == 41
    assert await metric(client, "step_rows_total", kind="decode") >= 41


async def test_metrics_of_the_engine(client: httpx.AsyncClient, engine: Any) -> None:
    engine.health = EngineStats(running=3, waiting=2, kv_cache_usage=0.5)
    assert await metric(client, "num_requests_running") == 3
    assert await metric(client, "num_requests_waiting") == 2
    assert await metric(client, "kv_cache_usage_perc") == 0.5


async def test_request_ids(client: httpx.AsyncClient, engine: Any) -> None:
    for path in ("/v1/models", "/nowhere"):
        response = await client.get(path, headers={"X-Request-ID": "my-id_1:a/b"})
        assert response.headers["x-request-id"] == "my-id_1:a/b"
    stream = await client.post("/v1/completions", json=HI | {"stream": True}, headers={"x-request-id": "mine"})
    assert stream.headers["x-request-id"] == "mine"
    assert "mine" not in stream.text


@pytest.mark.parametrize("offered", [None, "", "x" * 129, "a b", "a\tb", "é"])
async def test_request_ids_that_are_not_echoed(client: httpx.AsyncClient, offered: str | None) -> None:
    headers = {} if offered is None else {b"x-request-id": offered.encode("latin-1")}
    ids = {(await client.get("/v1/models", headers=headers)).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(len(request_id) == 32 and request_id.isalnum() for request_id in ids)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token(
    client: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.die_after = 0
    response = await client.post(path, json=body | {"stream": stream, "n": 2})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": "the engine failed: out of luck", "type": "server_error", "param": None, "code": "engine_failed",
    }  # fmt: skip
    assert engine.running == 0
    assert await metric(client, "request_success_total", finished_reason="error") >= 1


@BOTH
async def test_an_engine_that_dies_later(
    client: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any]
) -> None:
    engine.die_after = 3
    assert (await client.post(path, json=body)).status_code == 503
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    *chunks, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert sum("Hel"[i] in chunk for i, chunk in enumerate(chunks[-3:])) == 3
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert engine.running == 0


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_sequence_that_the_engine_refuses(
    client: httpx.AsyncClient, engine: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.refusal = "no room for it"
    response = await client.post(path, json=body | {"stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "no room for it"
    engine.refusal = None
    assert (await client.post(path, json=body)).status_code == 200


async def test_a_bug_before_the_answer_is_a_500_that_tells_nothing(client: httpx.AsyncClient, engine: Any) -> None:
    engine.reply = None  # len(None) raises in the fake
    for stream in (False, True):
        response = await client.post("/v1/completions", json=HI | {"stream": stream}, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["error"]["type"] == "server_error"
        assert "None" not in response.text
    assert engine.running == 0


async def test_a_bug_in_mid_stream_ends_it_with_an_error(
    client: httpx.AsyncClient, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.reply = [72, "x"]  # no token id
    response = await client.post("/v1/completions", json=HI | {"stream": True})
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "a stream failed" in caplog.text
    assert engine.running == 0


async def test_a_client_that_hangs_up_is_not_counted_as_a_failure_of_the_server(
    client: httpx.AsyncClient, engine: Any
) -> None:
    engine.pause = lambda: 3600.0
    for stream in (False, True):
        request = asyncio.create_task(client.post("/v1/completions", json=HI | {"stream": stream}))
        while not engine.running:
            await asyncio.sleep(0.001)
        request.cancel()
        await asyncio.wait([request])
    labels = {"method": "POST", "handler": "/v1/completions"}
    assert await metric(client, "http_requests_total", **labels, status="499") == 2
    assert 'status="500"' not in (await client.get("/metrics")).text
