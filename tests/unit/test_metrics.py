import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

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
