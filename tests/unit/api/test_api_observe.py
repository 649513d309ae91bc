"""What the log and the traces tell of a request."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from chairlift.api.tracing import SpanWriter
from chairlift.config import ConfigError, ServerConfig
from chairlift.engine.account import RequestAccount

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "prompt": "Hi"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Make = Callable[..., FastAPI]


def connecting(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


async def test_a_line_for_each_request_but_not_for_probes(make_app: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chairlift.request")
    async with connecting(make_app(ServerConfig(enable_log_requests=True, api_keys=("k",)))) as client:
        for path in ("/health", "/ready", "/metrics"):
            await client.get(path)
        await client.get("/v1/models", headers={"x-request-id": "without-key"})
        headers = {"authorization": "Bearer k", "x-request-id": "mine"}
        await client.post("/v1/completions", json=HI | {"n": 2, "max_tokens": 5, "stream": True}, headers=headers)
    refused, answered = [record.fields for record in caplog.records if record.name == "chairlift.request"]  # type: ignore[attr-defined]
    assert (refused["request_id"], refused["status"], refused["path"]) == ("without-key", 401, "/v1/models")
    assert "prompt_tokens" not in refused
    assert answered.pop("seconds") >= answered["time_to_first_token_seconds"]
    assert {name: value for name, value in answered.items() if not name.endswith("seconds")} == {
        "request_id": "mine", "method": "POST", "path": "/v1/completions", "status": 200, "stream": True,
        "sequences": 2, "prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 10, "preemptions": 0,
        "finish_reasons": ["length"],
    }  # fmt: skip
    assert answered["queue_seconds"] == 0.5


async def test_the_line_says_what_ended_a_request_early(
    make_app: Make, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chairlift.request")
    engine.pause = lambda: 3600.0
    async with connecting(make_app(ServerConfig(enable_log_requests=True, request_timeout=0.02))) as client:
        await client.post("/v1/completions", json=HI)
    [record] = [record for record in caplog.records if record.name == "chairlift.request"]
    assert record.fields["ended_by"] == "request_timeout"  # type: ignore[attr-defined]
    assert record.fields["finish_reasons"] == ["abort"]  # type: ignore[attr-defined]


async def test_nothing_is_logged_of_requests_unless_asked_for(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "chairlift.request")
    assert (await client.post("/v1/completions", json=HI)).status_code == 200
    assert not [record for record in caplog.records if record.name == "chairlift.request"]


# ---- traces ----


async def spans_of(make_app: Make, config: ServerConfig, *requests: dict[str, Any]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    writer = SpanWriter(exporter, "tiny")
    async with connecting(make_app(config, spans=writer)) as client:
        await client.get("/v1/models")
        for request in requests:
            await client.post("/v1/completions", **request)
    writer.close()
    return list(exporter.get_finished_spans())


async def test_a_span_for_each_request_within_the_trace_of_its_client(make_app: Make) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    inside, alone = await spans_of(
        make_app, ServerConfig(), {"json": HI | {"n": 2, "max_tokens": 5}, "headers": headers}, {"json": HI}
    )
    assert (inside.name, inside.kind) == ("llm_request", SpanKind.SERVER)
    assert inside.context is not None
    assert inside.parent is not None
    assert f"{inside.context.trace_id:032x}" == TRACE
    assert f"{inside.parent.span_id:016x}" == PARENT
    assert alone.parent is None
    assert inside.resource.attributes["service.name"] == "chairlift"
    attributes = dict(inside.attributes or {})
    assert inside.end_time - inside.start_time == int(attributes["gen_ai.latency.e2e"] * 1e9)  # type: ignore[operator]
    assert attributes["gen_ai.latency.time_in_queue"] == 0.5
    # The scripted engine does not say when the first token came, so that nothing is known of the stages after it.
    expected = {
        "http.response.status_code": 200, "gen_ai.request.id": "mine", "gen_ai.response.model": "tiny",
        "gen_ai.usage.num_sequences": 2, "gen_ai.usage.prompt_tokens": 4, "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert {name: attributes[name] for name in expected} == expected
    assert inside.status.status_code is StatusCode.UNSET


async def test_the_span_of_a_request_that_was_cut_off(make_app: Make, engine: Any) -> None:
    engine.pause = lambda: 3600.0
    [span] = await spans_of(make_app, ServerConfig(request_timeout=0.02), {"json": HI})
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "request_timeout"


def test_a_collector_that_does_not_answer_holds_up_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.api.tracing.CLOSE_SECONDS", 0.05)
    asked, answers = threading.Event(), threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            asked.set()
            answers.wait()  # for ever, as far as the writer can know
            return SpanExportResult.FAILURE

    writer = SpanWriter(Stuck(), "tiny")
    answer = {"method": "POST", "path": "/", "status": 200, "seconds": 0.1}
    writer.write("mine", answer, RequestAccount(sequences=1), {})
    writer.close()
    assert asked.is_set()
    answers.set()


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[otel\]'"):
        SpanWriter.to_endpoint("http://localhost:4318/v1/traces", "tiny")
