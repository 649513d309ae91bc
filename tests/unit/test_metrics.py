import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path

from chairlift.engine.account import RequestAccount, current_account
from chairlift.engine.client import EngineStats
from chairlift.engine.executor import Capacity
from chairlift.engine.metrics import EngineMetrics, MeteredEngine
from chairlift.scheduling.plan import RequestTiming, RowCounts, SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(max_model_len: int = 4096) -> tuple[EngineMetrics, Clock]:
    clock = Clock()
    return EngineMetrics("m", max_model_len, clock), clock


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"chairlift:{name}", {"model_name": "m", **labels})


def test_steps_are_counted_by_kind_of_row() -> None:
    metrics, _ = make()
    metrics.on_step(StepRecord(0, 0.0, 0.5, RowCounts(prefill=10, decode=2, recomputed=3), preempted=2))
    metrics.on_step(StepRecord(1, 0.5, 0.25, RowCounts(decode=4, padding=5, ended=1)))
    rows = {
        k: value(metrics, "step_rows_total", kind=k) for k in ("prefill", "decode", "recomputed", "padding", "ended")
    }
    assert rows == {"prefill": 10, "decode": 6, "recomputed": 3, "padding": 5, "ended": 1}
    assert value(metrics, "num_preemptions_total") == 2
    assert value(metrics, "step_seconds_total") == 0.75
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_sum") == 25
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 0
    assert value(metrics, "iteration_tokens_total_bucket", le="16.0") == 2


def test_latencies_of_a_sequence() -> None:
    metrics, clock = make()
    sequence = metrics.begin(prompt_tokens=7)
    clock.now += 2.0
    sequence.on_tokens(1)
    clock.now += 0.5
    sequence.on_tokens(1)
    clock.now += 1.0
    sequence.on_tokens(3)
    clock.now += 0.5
    sequence.on_timing(RequestTiming(arrival=1.0, admitted=1.125))
    sequence.on_timing(RequestTiming(arrival=1.0, admitted=1.125))
    sequence.on_end("length")
    assert value(metrics, "time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.5
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 1.5 / 4
    assert value(metrics, "e2e_request_latency_seconds_sum") == 4.0
    assert value(metrics, "request_queue_time_seconds_sum") == 0.125
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "request_prompt_tokens_sum") == 7
    assert value(metrics, "request_generation_tokens_sum") == 5
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


def test_an_end_is_counted_once_and_without_tokens_has_no_token_times() -> None:
    metrics, _ = make()
    sequence = metrics.begin(prompt_tokens=7)
    sequence.on_end("abort")
    sequence.on_end("stop")
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "prompt_tokens_total") == 0
    assert value(metrics, "request_generation_tokens_count") == 1


def test_one_token_has_no_time_per_further_token() -> None:
    metrics, _ = make()
    sequence = metrics.begin(prompt_tokens=1)
    sequence.on_tokens(1)
    sequence.on_end("stop")
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "e2e_request_latency_seconds_count") == 1


def test_render_shows_the_state_as_it_is_now() -> None:
    metrics, _ = make()
    stats = EngineStats(running=3, waiting=4, swapped=5, kv_cache_usage=0.5)
    lines = metrics.render(stats).decode().splitlines()
    assert 'chairlift:num_requests_running{model_name="m"} 3.0' in lines
    assert 'chairlift:num_requests_waiting{model_name="m"} 4.0' in lines
    assert 'chairlift:num_requests_swapped{model_name="m"} 5.0' in lines
    assert 'chairlift:kv_cache_usage_perc{model_name="m"} 0.5' in lines
    assert "# TYPE chairlift:time_to_first_token_seconds histogram" in lines
    assert 'chairlift:num_requests_running{model_name="m"} 0.0' in metrics.render(EngineStats()).decode().splitlines()


def test_token_count_buckets_end_at_the_model_length() -> None:
    metrics, _ = make(max_model_len=60)
    sequence = metrics.begin(prompt_tokens=50)
    sequence.on_end("stop")
    bounds = [
        sample.labels["le"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "chairlift:request_prompt_tokens_bucket"
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]


class OneTokenAtATime:
    """An engine that goes on until it is closed, and says when it is."""

    capacity = Capacity(num_blocks=1, block_size=1, max_model_len=64, vocab_size=10)

    def __init__(self) -> None:
        self.closed = False

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        try:
            while True:
                await asyncio.sleep(0)
                yield SequenceDelta("0", (1,))
        finally:
            await asyncio.sleep(0)
            self.closed = True

    def stats(self) -> EngineStats:
        return EngineStats()

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        pass

    async def close(self) -> None:
        pass


def test_closing_a_metered_sequence_closes_the_engines() -> None:
    metrics, _ = make()
    engine = OneTokenAtATime()

    async def main() -> None:
        stream = MeteredEngine(engine, metrics).generate([1, 2], SamplingParams())
        assert isinstance(stream, AsyncGenerator)
        await anext(stream)
        await stream.aclose()
        assert engine.closed

    asyncio.run(main())
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "prompt_tokens_total") == 2


def test_cancelling_a_metered_sequence_counts_as_an_abort() -> None:
    metrics, _ = make()
    engine = OneTokenAtATime()

    async def main() -> None:
        async def read() -> None:
            async for _ in MeteredEngine(engine, metrics).generate([1, 2], SamplingParams()):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert engine.closed

    asyncio.run(main())
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


def test_two_engines_do_not_share_metrics() -> None:
    (one, _), (two, _) = make(), make()
    one.begin(1).on_end("stop")
    assert value(two, "request_success_total", finished_reason="stop") == 0


def test_stages_of_a_sequence_and_the_account_of_its_request() -> None:
    metrics, clock = make()
    account = RequestAccount()
    token = current_account.set(account)
    slow, quick = metrics.begin(7, max_tokens=50), metrics.begin(7, max_tokens=50)
    current_account.reset(token)
    clock.now += 2.0
    slow.on_tokens(1)
    clock.now += 1.0
    quick.on_tokens(1)
    clock.now += 3.0
    slow.on_tokens(4)
    slow.on_timing(RequestTiming(1.0, admitted=1.5, first_token=1.75, preemptions=2, cached_tokens=3))
    quick.on_timing(RequestTiming(1.0, admitted=2.5, first_token=2.625))
    slow.on_end("length")
    quick.on_end("stop")
    metrics.begin(1).on_end("stop")  # of another request
    assert value(metrics, "request_prefill_time_seconds_sum") == 0.375
    assert value(metrics, "request_decode_time_seconds_sum") == 4.0
    assert value(metrics, "request_inference_time_seconds_sum") == 4.375
    assert value(metrics, "prompt_tokens_cached_total") == 3
    assert value(metrics, "request_params_max_tokens_sum") == 100
    assert account == RequestAccount(
        sequences=2, prompt_tokens=14, completion_tokens=6, cached_tokens=3, queue=1.5, prefill=0.25, decode=4.0,
        time_to_first_token=2.0, preemptions=2, finish_reasons=["length", "stop"],
    )  # fmt: skip


def test_a_stage_that_was_not_reached_is_not_counted() -> None:
    metrics, _ = make()
    for timing in (RequestTiming(1.0), RequestTiming(1.0, admitted=2.0)):
        sequence = metrics.begin(7)
        sequence.on_timing(timing)
        sequence.on_end("abort")
    assert value(metrics, "request_queue_time_seconds_count") == 1
    assert value(metrics, "request_prefill_time_seconds_count") == 0
    assert value(metrics, "request_inference_time_seconds_count") == 0


def test_an_engine_that_was_replaced() -> None:
    metrics, _ = make()
    metrics.render(EngineStats(), Capacity(num_blocks=100, block_size=16, max_model_len=64, vocab_size=10))
    assert value(metrics, "engine_up") == 1
    metrics.render(EngineStats(alive=False, retry_after=1.0))
    assert value(metrics, "engine_up") == 0
    text = ""
    for _ in range(2):
        capacity = Capacity(num_blocks=90, block_size=16, max_model_len=64, vocab_size=10, dtype="float32")
        text = metrics.render(EngineStats(restarts=2), capacity).decode()
    assert value(metrics, "engine_restarts_total") == 2
    [info] = [line for line in text.splitlines() if line.startswith("chairlift:cache_config_info{")]
    assert info == (
        'chairlift:cache_config_info{block_size="16",cache_dtype="float32",model_name="m",num_cpu_blocks="0",'
        'num_gpu_blocks="90"} 1.0'
    )


def test_answers_are_counted_under_few_labels() -> None:
    metrics, _ = make()
    metrics.on_response("POST", "/v1/completions", 429)
    metrics.on_response("BREW", "none", 404)
    assert value(metrics, "http_requests_total", method="POST", handler="/v1/completions", status="429") == 1
    assert value(metrics, "http_requests_total", method="other", handler="none", status="404") == 1


DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "chairlift.json"


def test_the_dashboard_uses_metrics_that_exist() -> None:
    metrics, _ = make()
    metrics.on_response("GET", "/health", 200)
    metrics.render(EngineStats(), OneTokenAtATime.capacity)
    samples = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 15
    for expression in expressions:
        names = set(re.findall(r"(?:chairlift|process)[:_]\w+", expression))
        assert names, expression
        assert names <= samples, f"{names - samples} in {expression}"
    shown = {name for expression in expressions for name in re.findall(r"chairlift:(\w+)", expression)}
    assert {"engine_up", "engine_restarts_total", "num_requests_waiting", "kv_cache_usage_perc"} <= shown
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
