"""What Prometheus scrapes: the state of the engine, its steps, and how each sequence fared.

Names, labels and buckets are vLLM's under a prefix of our own, so that a dashboard made for it needs one replacement:
https://docs.vllm.ai/en/latest/usage/metrics.html. Latencies are a client's: their clock starts when the server has
read the request, and a token counts when it has come from the engine, before it is text.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from chairlift.engine.account import RequestAccount, current_account, longest
from chairlift.engine.client import AsyncEngineClient, EngineStats
from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import RequestTiming, RowCounts, SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FINISH_REASONS = ("stop", "length", "abort", "error")
CACHE_CONFIG = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ROW_KINDS = tuple(f.name for f in fields(RowCounts))

# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
TOKEN_TIME_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_TIME_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
STEP_TOKENS_BUCKETS = tuple(2**i for i in (0, *range(3, 15)))


class EngineMetrics:
    """The metrics of one engine, in a registry of their own.

    Args:
        model_name: the value of the label ``model_name``.
        max_model_len: the longest sequence in tokens, which bounds the buckets of the token counts.
        clock: seconds, as :func:`time.monotonic`.
    """

    def __init__(self, model_name: str, max_model_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # of the server; the engine is a process of its own
        self.clock = clock
        self._model_name = model_name
        self._engine_metrics()
        self._request_metrics(max_model_len)
        self._responses = Counter(
            "chairlift:http_requests",
            "HTTP requests answered, by method, route and status; refused ones too.",
            ("model_name", "method", "handler", "status"),
            registry=self.registry,
        )

    def _engine_metrics(self) -> None:
        self._up = self._gauge("engine_up", "Whether the engine takes requests.")
        self._restarts = self._counter("engine_restarts", "Engines that took the place of one that had ended.")
        self._restarts_counted = 0
        self._cache_config = Gauge(
            "chairlift:cache_config_info",
            "The KV cache; always 1.",
            ("model_name", *CACHE_CONFIG),
            registry=self.registry,
        )
        self._running = self._gauge("num_requests_running", "Sequences in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait to be admitted.")
        self._swapped = self._gauge("num_requests_swapped", "Sequences whose KV cache is in host memory.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.")
        self._preemptions = self._counter("num_preemptions", "Sequences put aside to make room for others.")
        self._swapped_out = self._counter("swapped_out_blocks", "KV blocks copied to the host.")
        self._swapped_in = self._counter("swapped_in_blocks", "KV blocks copied back from the host.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens that the prefix cache had.")
        self._step_tokens = self._histogram("iteration_tokens_total", "Token rows in a step.", STEP_TOKENS_BUCKETS)
        self._busy = self._counter("step_seconds", "Seconds spent computing steps.")
        rows = Counter(
            "chairlift:step_rows",
            "Token rows computed, by kind; only prefill and decode are of use to a client.",
            ("model_name", "kind"),
            registry=self.registry,
        )
        self._rows = {kind: rows.labels(self._model_name, kind) for kind in ROW_KINDS}

    def _request_metrics(self, max_model_len: int) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences that got a token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Those of them that the prefix cache had.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "chairlift:request_success",
            "Sequences that ended, by how.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.finished = {reason: success.labels(self._model_name, reason) for reason in FINISH_REASONS}
        self.ttft = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", TTFT_BUCKETS)
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Seconds between one arrival of tokens and the next.", TOKEN_TIME_BUCKETS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first.", TOKEN_TIME_BUCKETS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Seconds to the end.", REQUEST_TIME_BUCKETS)
        self.queue = self._histogram(
            "request_queue_time_seconds", "Seconds before the first step.", REQUEST_TIME_BUCKETS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token.", REQUEST_TIME_BUCKETS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last.", REQUEST_TIME_BUCKETS
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Seconds from the first step to the last token.", REQUEST_TIME_BUCKETS
        )
        counts = _one_two_five(max_model_len)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", counts)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens generated for one.", counts)
        self.max_tokens = self._histogram("request_params_max_tokens", "Tokens that one may have at most.", counts)

    def on_step(self, record: StepRecord) -> None:
        """Counts a step; for :meth:`AsyncEngineClient.subscribe`."""
        self._step_tokens.observe(record.rows.total)
        self._busy.inc(record.elapsed)
        self._preemptions.inc(record.preempted)
        self._swapped_out.inc(record.blocks_swapped_out)
        self._swapped_in.inc(record.blocks_swapped_in)
        self._cache_queries.inc(record.looked_up_tokens)
        self._cache_hits.inc(record.cached_tokens)
        for kind, counter in self._rows.items():
            if count := getattr(record.rows, kind):
                counter.inc(count)

    def on_response(self, method: str, handler: str, status: int) -> None:
        """Counts an answer. ``handler`` is the path of a route, of which there are few."""
        self._responses.labels(self._model_name, method if method in METHODS else "other", handler, str(status)).inc()

    def begin(self, prompt_tokens: int, max_tokens: int | None = None) -> SequenceMetrics:
        """Starts the clock of one sequence, which counts towards the account of the request it is part of."""
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)
        return SequenceMetrics(self, prompt_tokens, current_account.get())

    def render(self, stats: EngineStats, capacity: Capacity | None = None) -> bytes:
        """Returns every metric in Prometheus' text format, the engine's state as ``stats`` and ``capacity`` say."""
        self._up.set(stats.alive and not stats.wedged)
        self._restarts.inc(stats.restarts - self._restarts_counted)
        self._restarts_counted = stats.restarts
        if capacity is not None:
            self._cache_config.clear()  # another engine may have found room for more blocks, or for fewer
            sizes = (capacity.block_size, capacity.num_blocks, capacity.num_host_blocks, capacity.dtype)
            self._cache_config.labels(self._model_name, *map(str, sizes)).set(1)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._swapped.set(stats.swapped)
        self._kv_usage.set(stats.kv_cache_usage)
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"chairlift:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"chairlift:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"chairlift:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return metric.labels(self._model_name)


class MeteredEngine:
    """An engine whose sequences are counted. Otherwise it is the engine: an :class:`AsyncEngineClient`.

    How a sequence ended is the engine's word. Where the reader leaves before that, being cancelled means that nobody
    wants the text any more, and closing the iterator that the text is complete: a stop string was found.
    """

    def __init__(self, engine: AsyncEngineClient, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        engine.subscribe(metrics.on_step)

    @property
    def capacity(self) -> Capacity:
        """What fits, and what is loaded."""
        return self._engine.capacity

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        """Runs one sequence, and counts it."""
        sequence = self._metrics.begin(len(prompt_token_ids), params.max_tokens)
        stream: AsyncIterator[SequenceDelta] | None = None
        try:
            stream = self._engine.generate(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
            async for delta in stream:
                if delta.token_ids:
                    sequence.on_tokens(len(delta.token_ids))
                if delta.timing is not None:
                    sequence.on_timing(delta.timing)
                if delta.finish_reason is not None:
                    sequence.on_end(delta.finish_reason)
                yield delta
        except GeneratorExit:
            sequence.on_end("stop")
            raise
        except asyncio.CancelledError:
            sequence.on_end("abort")
            raise
        finally:
            sequence.on_end("error")  # unless one of the others came first
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    def stats(self) -> EngineStats:
        """Returns the state as last heard. Never blocks."""
        return self._engine.stats()

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        """Calls back after each step."""
        self._engine.subscribe(on_step)

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close()


class SequenceMetrics:
    """The clock and the counts of one sequence, from arrival to its end, which is counted once."""

    def __init__(self, metrics: EngineMetrics, prompt_tokens: int, account: RequestAccount | None = None) -> None:
        self._metrics = metrics
        self._account = account or RequestAccount()  # one that nobody reads
        self._prompt_tokens = prompt_tokens
        self._generated = 0
        self._arrival = metrics.clock()
        self._first = self._last = self._arrival
        self._timing: RequestTiming | None = None
        self._ended = False
        self._account.sequences += 1
        self._account.prompt_tokens += prompt_tokens

    def on_tokens(self, count: int) -> None:
        """Counts tokens that arrived just now, at least one."""
        metrics, now = self._metrics, self._metrics.clock()
        if self._generated:
            metrics.itl.observe(now - self._last)
        else:
            self._first = now
            metrics.ttft.observe(now - self._arrival)
            metrics.prompt_tokens.inc(self._prompt_tokens)
            earlier = self._account.time_to_first_token
            self._account.time_to_first_token = min(now - self._arrival, earlier if earlier is not None else math.inf)
        self._last = now
        self._generated += count
        self._account.completion_tokens += count
        metrics.generation_tokens.inc(count)

    def on_timing(self, timing: RequestTiming) -> None:
        """Counts how long it waited, from arrival to its first step, when that is first known."""
        known = self._timing is not None and self._timing.admitted is not None
        self._timing = timing
        if timing.admitted is not None and not known:
            waited = timing.admitted - timing.arrival
            self._metrics.queue.observe(waited)
            self._metrics.cached_tokens.inc(timing.cached_tokens)
            self._account.queue = longest(self._account.queue, waited)
            self._account.cached_tokens += timing.cached_tokens

    def on_end(self, finish_reason: str) -> None:
        """Counts the end, the first time it is called. ``finish_reason`` is one of :data:`FINISH_REASONS`."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.finished[finish_reason].inc()
        metrics.e2e.observe(metrics.clock() - self._arrival)
        metrics.request_prompt.observe(self._prompt_tokens)
        metrics.request_generation.observe(self._generated)
        if self._generated > 1:
            metrics.tpot.observe((self._last - self._first) / (self._generated - 1))
        self._account.end(finish_reason)
        self._count_stages()

    def _count_stages(self) -> None:
        timing = self._timing
        if timing is None or timing.admitted is None:
            return
        self._account.preemptions += timing.preemptions
        if timing.first_token is None:
            return
        # By two clocks that run alike: the engine knows when it began, the reader what it has really had.
        prefill, decode = timing.first_token - timing.admitted, self._last - self._first
        self._metrics.prefill.observe(prefill)
        self._metrics.decode.observe(decode)
        self._metrics.inference.observe(prefill + decode)
        self._account.prefill = longest(self._account.prefill, prefill)
        self._account.decode = longest(self._account.decode, decode)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to ``limit``."""
    buckets: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return buckets
            buckets.append(step * power)
        power *= 10
