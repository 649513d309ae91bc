"""A span for each request, by OpenTelemetry, which is an extra: ``pip install 'chairlift[otel]'``.

Attributes are named as the semantic conventions for generative AI have them, and as vLLM names the times of the stages:
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chairlift import __version__
from chairlift.config import ConfigError
from chairlift.engine.account import RequestAccount

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_TIMEOUT_SECONDS = 5.0
CLOSE_SECONDS = 5.0
SPAN_NAME = "llm_request"


class SpanWriter:
    """Writes spans, and sends them in a thread of its own.

    Args:
        exporter: where they go.
        model_name: what the model is served as.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({"service.name": "chairlift"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("chairlift", __version__)
        self._model_name = model_name

    @classmethod
    def to_endpoint(cls, endpoint: str, model_name: str) -> SpanWriter:
        """Returns one that sends to the URL of an OTLP collector, over HTTP."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({error}); run: "
                "pip install 'chairlift[otel]'"
            ) from None
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_SECONDS), model_name)

    def write(
        self, request_id: str, answer: Mapping[str, Any], account: RequestAccount, headers: Mapping[str, str]
    ) -> None:
        """Writes the span of a request that ends now.

        Args:
            request_id: its label.
            answer: its ``method``, ``path``, ``status`` and ``seconds``, and ``ended_by`` where there is one.
            account: what it used of the engine.
            headers: the request's, which may name the trace that it is part of (``traceparent``).
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=now - int(answer["seconds"] * 1e9),
            attributes=self._attributes(request_id, answer, account),
        )
        if answer["status"] >= 500 or "error" in account.finish_reasons or "ended_by" in answer:
            span.set_status(Status(StatusCode.ERROR, answer.get("ended_by")))
        span.end(now)

    def _attributes(
        self, request_id: str, answer: Mapping[str, Any], account: RequestAccount
    ) -> dict[str, str | int | float | list[str]]:
        attributes: dict[str, str | int | float | list[str] | None] = {
            "http.request.method": answer["method"],
            "url.path": answer["path"],
            "http.response.status_code": answer["status"],
            "error.type": answer.get("ended_by"),
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": account.finish_reasons,
            "gen_ai.usage.num_sequences": account.sequences,
            "gen_ai.usage.prompt_tokens": account.prompt_tokens,
            "gen_ai.usage.completion_tokens": account.completion_tokens,
            "gen_ai.usage.cached_tokens": account.cached_tokens,
            "gen_ai.latency.e2e": answer["seconds"],
            "gen_ai.latency.time_to_first_token": account.time_to_first_token,
            "gen_ai.latency.time_in_queue": account.queue,
            "gen_ai.latency.time_in_model_prefill": account.prefill,
            "gen_ai.latency.time_in_model_decode": account.decode,
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> None:
        """Sends what is left, as far as that goes within some seconds: a collector that is away is tried for long."""
        sending = threading.Thread(target=self._provider.shutdown, name="chairlift-last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)
