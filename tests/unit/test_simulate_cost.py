"""The cost model: what it was fitted to, and what must hold of any."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from chairlift.config import ConfigError
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AddRequest, EngineCore
from chairlift.engine.executor import Capacity
from chairlift.engine.records import StepLog
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.scheduling.work import StepWork, step_work
from chairlift.simulate import validation
from chairlift.simulate.calibrate import StepTimer, _logged_step, fit_step_log
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import engine_coefficients, engine_names, layer_shape, roofline
from chairlift.simulate.executor import SimulatedExecutor
from chairlift.simulate.measured import TERMS, fit_cost, load_cost, non_negative_least_squares
from chairlift.simulate.sizes import PRECISIONS, Deployment


def deployment(model: str = "llama-2-13b", hardware: str = "a100-80g", **changes) -> Deployment:
    return Deployment(model=MODELS[model], hardware=HARDWARE[hardware], max_model_len=4096, **changes)


# ---- against measurements ----


@pytest.mark.parametrize(("engine", "within"), [("distserve", 0.96), ("vllm-0.2.3", 0.89)])
def test_step_times_over_the_measured_range(engine: str, within: float):
    errors = validation.step_errors(engine)
    total = errors["all", 0, ""]
    assert total.count == 1796
    assert total.mean_absolute < 0.05
    assert total.within_tenth > within
    groups = [group for key, group in errors.items() if key[0] != "all"]
    assert len(groups) == 12
    assert all(group.mean_absolute < 0.10 for group in groups)


@pytest.mark.parametrize("device", ["a100", "h100", "a40"])
def test_matrix_products_of_a_layer_over_the_measured_range(device: str):
    errors = validation.operator_errors(device)
    assert errors[0].count > 200
    assert errors[0].mean_absolute < 0.05
    assert errors[0].within_tenth > 0.91
    assert all(errors[size].mean_absolute < 0.06 for size in (1, 2, 4))


def test_errors_are_counted_as_they_are():
    errors = validation.summarize([11.0, 9.0, 10.0, 15.0], [10.0, 10.0, 10.0, 10.0])
    assert errors.mean_absolute == pytest.approx(0.175)
    assert errors.bias == pytest.approx(0.125)
    assert errors.worst == pytest.approx(0.5)
    assert errors.within_tenth == 0.75


# ---- of any deployment ----


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("hardware", list(HARDWARE))
def test_more_work_takes_longer(engine: str, hardware: str):
    cost = roofline(deployment("llama-3-8b", hardware), engine)
    base = StepWork(rows=64, sequences=64, sampled=64, context=20_000)
    least = cost.seconds(base)
    for name in ("rows", "context", "pairs", "sampled", "swapped_blocks"):
        assert cost.seconds(replace(base, **{name: getattr(base, name) + 5000})) > least, name


def test_one_sequence_reads_the_weights_once():
    d = deployment()
    seconds = roofline(d, "distserve").seconds(StepWork(1, 1, 1, 100))
    at_peak = d.weight_bytes / d.hardware.memory_bandwidth
    assert at_peak < seconds < 2 * at_peak


def test_a_long_prompt_runs_near_the_arithmetic_peak():
    d = deployment()
    rows = 4096
    seconds = roofline(d, "distserve").seconds(StepWork(rows, 1, 1, 0, rows * rows // 2))
    at_peak = 2 * d.layer_weights * rows / d.hardware.peak_flops
    assert 1.2 * at_peak < seconds < 2.5 * at_peak


def test_fewer_bytes_and_faster_hardware_take_less_time():
    decode = StepWork(8, 8, 8, 4000)
    seconds = {
        name: roofline(deployment(hardware=hardware, **changes), "distserve").seconds(decode)
        for name, hardware, changes in (
            ("a100", "a100-80g", {}),
            ("int8", "a100-80g", {"precision": PRECISIONS["int8"]}),
            ("h100", "h100", {}),
            ("h200", "h200", {}),
            ("tp2", "a100-80g", {"tensor_parallel_size": 2}),
        )
    }
    assert seconds["int8"] < 0.75 * seconds["a100"]
    assert seconds["h200"] < seconds["h100"] < seconds["a100"]
    assert 0.5 < seconds["tp2"] / seconds["a100"] < 0.9


def test_quantized_weights_do_not_speed_up_a_prefill_but_fp8_products_do():
    prefill = StepWork(4096, 1, 1, 0, 4096 * 2048)
    whole, int8, fp8 = (
        roofline(deployment(hardware="h100", precision=PRECISIONS[name]), "distserve").seconds(prefill)
        for name in ("bfloat16", "int8", "fp8")
    )
    assert int8 == pytest.approx(whole, rel=0.05)
    assert fp8 < 0.85 * whole


def test_a_step_reads_the_scales_of_an_int8_cache_too():
    shapes = [layer_shape(deployment(kv_itemsize=1, kv_scale_bytes=scale)) for scale in (0, 4)]
    assert [shape.kv_bytes for shape in shapes] == [2 * 40 * 128, 2 * 40 * (128 + 4)]
    assert [shape.kv_block_bytes for shape in shapes] == [40 * 16 * shape.kv_bytes for shape in shapes]


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match=r"choose from distserve, vllm-0\.2\.3"):
        engine_coefficients("sglang")


# ---- what a plan computes ----


def chunk(name: str, count: int, start: int, samples: bool) -> SequenceChunk:
    params = SamplingParams(seed=0) if samples else None
    return SequenceChunk(name, [0] * count, start, [], params)


def test_the_work_of_a_plan():
    plan = StepPlan(
        0,
        [
            chunk("decodes", 1, 99, True),
            chunk("begins", 10, 0, False),
            chunk("goes on", 4, 20, True),
            chunk("last token", 1, 7, True),
        ],
        RowCounts(),
        swap_out=[(1, 2)],
        swap_in=[(3, 4), (5, 6)],
    )
    assert step_work(plan) == StepWork(
        rows=16,
        sequences=4,
        sampled=3,
        context=100 + 0 + 20 + 8,
        pairs=sum(range(1, 11)) + sum(range(21, 25)),
        swapped_blocks=3,
    )


# ---- fitted to steps ----


def test_least_squares_with_a_bound():
    rng = np.random.default_rng(0)
    a = rng.random((50, 6))
    truth = np.array([0.0, 2.0, 0.0, 1.0, 0.5, 0.0])
    assert non_negative_least_squares(a, a @ truth) == pytest.approx(truth, abs=1e-8)
    # Where the free solution is negative, the bound holds and the rest is refitted.
    b = a @ np.array([-1.0, 2.0, 0.0, 1.0, 0.5, 0.0])
    x = non_negative_least_squares(a, b)
    assert x.min() >= 0
    gradient = a.T @ (a @ x - b)
    assert (gradient[x == 0] > -1e-8).all()
    assert np.abs(gradient[x > 0]).max() < 1e-8


ABOUT = {"model": "m", "dtype": "float32", "device": "cpu", "capacity": {"block_size": 16}, "source": "a test"}


def synthetic_steps(count: int) -> list[tuple[StepWork, float]]:
    rng = np.random.default_rng(1)
    steps = []
    for _ in range(count):
        sequences = int(rng.integers(1, 65))
        prefill = int(rng.choice([0, 0, 30, 300]))
        work = StepWork(
            sequences + prefill,
            sequences,
            sequences,
            sequences * int(rng.integers(10, 900)),
            prefill * int(rng.integers(20, 900)),
        )
        steps.append((work, 2e-3 + 1e-4 * work.rows + 3e-8 * work.context + 1e-8 * work.pairs))
    return steps


def test_a_fit_finds_the_law_that_the_steps_follow(tmp_path):
    steps = synthetic_steps(200)
    cost = fit_cost(steps, **ABOUT)
    assert cost.mean_error < 1e-6
    unseen = StepWork(500, 20, 20, 9000, 480 * 100)
    assert cost.seconds(unseen) == pytest.approx(2e-3 + 0.05 + 2.7e-4 + 4.8e-4, rel=1e-3)
    cost.save(tmp_path / "deep" / "cost.json")
    assert load_cost(tmp_path / "deep" / "cost.json") == cost


def test_a_fit_to_noisy_steps_is_not_faster_than_they_are_on_average():
    rng = np.random.default_rng(3)
    steps = [(work, seconds * rng.gamma(4.0, 1 / 4.0)) for work, seconds in synthetic_steps(4000)]
    cost = fit_cost(steps, **ABOUT)
    predicted = sum(cost.seconds(work) for work, _ in steps)
    assert predicted == pytest.approx(sum(seconds for _, seconds in steps), rel=0.01)


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match=f"5 steps are too few to fit {len(TERMS)}"):
        fit_cost(synthetic_steps(5), **ABOUT)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other/1"}', '{"format": "chairlift.cost/1"}'])
def test_what_is_no_cost_model_is_refused(tmp_path, content: str):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no cost model can be read"):
        load_cost(path)


def record(step: int = 0, time: float = 0.0, *, work: StepWork, elapsed: float = 1.0, running: int = 1) -> dict:
    made = StepRecord(
        step,
        time,
        elapsed,
        RowCounts(decode=work.sequences, prefill=work.rows - work.sequences),
        running=running,
        sequences=work.sequences,
        sampled=work.sampled,
        context=work.context,
        pairs=work.pairs,
    )
    return asdict(made)


def write_log(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_a_step_log_is_fitted_and_its_stalls_are_left_out(tmp_path):
    """Executor, 1 ms of the engine's own work, and a pause after every fiftieth, when nobody is left."""
    records, now = [], 100.0
    for step, (work, seconds) in enumerate(synthetic_steps(300)):
        elapsed = 20 * seconds if step % 40 == 7 else seconds
        records.append(record(step, now, work=work, elapsed=elapsed, running=int(step % 50 != 49)))
        now += elapsed + (0.001 if step % 50 != 49 else 60.0)
    cost = fit_step_log(write_log(tmp_path / "steps.jsonl", records), 16)
    assert cost.steps == 300 - 8
    for work in (StepWork(30, 30, 30, 16_000), StepWork(330, 30, 30, 16_000, 100_000)):
        law = 2e-3 + 1e-4 * work.rows + 3e-8 * work.context + 1e-8 * work.pairs
        assert cost.seconds(work) == pytest.approx(law + 0.001, rel=0.02)
    assert cost.coefficients["pairs"] == pytest.approx(1e-8, rel=0.1)


def test_what_a_server_logs_is_what_a_calibration_would_have_noted(tmp_path):
    capacity = Capacity(num_blocks=40, block_size=4, max_model_len=64, vocab_size=10, eos_token_ids=())
    timer = StepTimer(SimulatedExecutor(capacity, fit_cost(synthetic_steps(200), **ABOUT)))
    params = SamplingParams(max_tokens=9, seed=0, ignore_eos=True)
    inbox = [[AddRequest(str(i), [i] * (3 + 9 * i), params, 0.0) for i in range(3)]]
    scheduler = ContinuousScheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), KVManager(40, 4), max_model_len=64
    )
    with StepLog(tmp_path / "steps.jsonl") as log:
        core = EngineCore(scheduler, timer, VirtualClock(), lambda: inbox.pop() if inbox else [], step_log=log)
        while inbox or core.has_work:
            core.step()
    noted = [work for work, _ in timer.steps]
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [_logged_step(line).work for line in lines] == noted
    assert any(work.pairs and work.context for work in noted)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is no step record"),
        ('{"rows": {}}', "'prefill' is missing"),
        (json.dumps(record(work=StepWork(1, 1)) | {"elapsed": 0}), "elapsed is 0"),
        (json.dumps(record(work=StepWork(1, 1)) | {"elapsed": "x"}), "could not convert"),
        ("[]", "line 2 is no step record"),
    ],
)
def test_a_damaged_step_log_is_refused_with_its_line(tmp_path, line: str, message: str):
    path = write_log(tmp_path / "steps.jsonl", [record(work=StepWork(1, 1))])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message):
        fit_step_log(path, 16)
