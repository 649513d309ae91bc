"""The simulator end to end: against published throughput, on the whole case study, and against a real engine."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support.tiny_model import save_tiny_model

from chairlift.cli.simulate import simulate as simulate_command
from chairlift.config import EngineConfig
from chairlift.execution.local import LocalExecutor
from chairlift.scheduling.work import StepWork
from chairlift.simulate.calibrate import calibrate
from chairlift.simulate.case_study import REFERENCES, SETTINGS, run_setting
from chairlift.simulate.measured import load_cost
from chairlift.simulate.published import PUBLISHED, Published


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
def test_published_throughput_is_met_within_a_fifth(published: Published):
    simulated = published.simulate(None if published.static else 2000)
    assert simulated == pytest.approx(published.output_throughput, rel=0.20)


def test_the_case_study_shows_which_figures_hold():
    result = run_setting(SETTINGS[0])
    by_name = {(r.key, r.policy, r.clients): r for r in REFERENCES}
    for key in (("mean_e2el_ms", "static", 50), ("mean_e2el_ms", "continuous", 50), ("tokens", "continuous", 50)):
        assert result.holds(by_name[key], 0.25), key
    # In a closed loop of a full engine, latency grows with the clients: P99 cannot stay what it was.
    ratio = result.value(by_name["p99_e2el_ms", "continuous", 80]) / result.value(
        by_name["p99_e2el_ms", "continuous", 50]
    )
    assert ratio > 1.2
    # Little's law: clients = requests a second × mean latency.
    for (_, clients), metrics in result.metrics.items():
        assert metrics["request_throughput"] * metrics["mean_e2el_ms"] / 1000 == pytest.approx(clients, rel=0.15)


def test_an_engine_of_this_machine_is_calibrated(tmp_path):
    save_tiny_model(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=4_000_000
    )
    executor = LocalExecutor(config)
    noted = []
    rounds = ((1, 20, 12, 2), (4, 60, 12, 2), (8, 30, 10, 2))
    try:
        cost = calibrate(executor, config, rounds=rounds, repeats=1, note=noted.append)
    finally:
        executor.close()
    assert len(noted) == 3
    assert cost.steps > 30
    assert cost.dtype == "float32"
    assert cost.capacity["block_size"] == 16
    assert 0 < cost.seconds(StepWork(1, 1, 1, 20)) < cost.seconds(StepWork(64, 8, 8, 400, 2000)) < 10


def test_calibration_from_the_command_line_is_kept_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("chairlift.simulate.calibrate.ROUNDS", ((1, 20, 10, 2), (8, 30, 10, 2)))
    model = tmp_path / "model"
    save_tiny_model(model)
    run = CliRunner().invoke
    result = run(simulate_command, [str(model), "--calibrate", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"])
    assert result.exit_code == 0, (result.output, result.exception)
    (stored,) = (tmp_path / "cache" / "calibration").iterdir()
    assert load_cost(stored).steps > 20
    numbers = tmp_path / "numbers.json"
    used = [str(model), "--hardware", "this", "--clients", "4", "--num-requests", "8", "--input-len", "20"]
    result = run(
        simulate_command, [*used, "--output-len", "10", "--dtype", load_cost(stored).dtype, "--json", str(numbers)]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = json.loads(numbers.read_text())["policies"][0]["metrics"]
    assert metrics["completed"]["median"] == 8
    assert metrics["mean_e2el_ms"]["median"] > 0
