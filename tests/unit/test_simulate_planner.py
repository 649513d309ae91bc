"""Plans, searches and the commands around them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from chairlift.cli.plan import plan as plan_command
from chairlift.cli.simulate import simulate as simulate_command
from chairlift.config import ConfigError
from chairlift.measure.metrics import meets
from chairlift.scheduling.work import StepWork
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import roofline
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.measured import fit_cost
from chairlift.simulate.planner import expected_fill, make_plan, rows_per_step
from chairlift.simulate.search import Attainment, Setting, best_limits, cost_per_million, fewest_replicas, largest_rate
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import synthetic_workload

CHAT = ("lognormal:220:1.2:2000", "lognormal:233:1:1800")


def deployment(model: str = "llama-3-8b", hardware: str = "l4", **changes) -> Deployment:
    return Deployment(**{"model": MODELS[model], "hardware": HARDWARE[hardware], "max_model_len": 4096, **changes})


def setting(sized: Deployment, **changes) -> Setting:
    return Setting(deployment=sized, cost=roofline(sized, "distserve"), **changes)


# ---- plan ----


def test_sequences_are_the_budget_over_their_length():
    lengths = draw_lengths("500", "300", 1000)
    sized = make_plan(deployment("llama-2-13b", "a100-80g"), lengths)
    d = sized.deployment
    assert sized.by_final_length == d.kv_tokens // 800
    # Somewhere between 500 and 800 tokens each, and half a block: 0.97 of the cache for so many that chance evens out.
    assert sized.expected == pytest.approx(0.97 * d.kv_tokens / (500 + 150 + 8), abs=2)
    assert sized.safe == d.kv_tokens // 800
    assert sized.worst == d.kv_tokens // 4096
    assert d.max_num_seqs == sized.safe
    assert d.kv_budget == d.usable_bytes - d.weight_bytes - d.context_bytes - d.activation_bytes


@pytest.mark.parametrize(
    ("model", "hardware", "devices", "prompt", "output"),
    [
        ("llama-3-8b", "l4", 1, *CHAT),
        ("llama-2-13b", "a100-40g", 1, *CHAT),
        ("llama-2-13b", "a100-40g", 1, "exponential:300:2000", "exponential:300:2000"),
        ("llama-2-70b", "a100-80g", 2, "lognormal:700:0.6:3000", "uniform:50:400"),
        ("llama-2-13b", "a100-40g", 1, "512", "256"),
        ("llama-3-8b", "l4", 1, "lognormal:1500:0.8:3500", "exponential:60:500"),
        ("llama-3-8b", "l4", 1, "uniform:1000:3000", "lognormal:150:0.7:800"),
        ("mistral-7b", "a100-40g", 1, "uniform:2000:3500", "exponential:40:400"),
        ("llama-2-13b", "a100-40g", 1, "lognormal:60:1:500", "lognormal:900:0.7:3500"),
    ],
)
def test_the_safe_value_preempts_nobody_and_the_expected_one_fills_the_cache(
    model: str, hardware: str, devices: int, prompt: str, output: str
):
    lengths = draw_lengths(prompt, output, 20_000)
    filled, preempted = {}, {}
    for name in ("safe", "expected"):
        sized = make_plan(deployment(model, hardware, tensor_parallel_size=devices), lengths, aim=name)
        assert sized.safe < sized.expected
        work = synthetic_workload(draw_lengths(prompt, output, sized.deployment.max_num_seqs * 20, seed=5))
        records = setting(sized.deployment).run(work).records[0]
        preempted[name] = sum(record.preempted for record in records)
        busy = [record for record in records if record.waiting and record.step > len(records) // 10]
        shares = [record.blocks_used / record.blocks_total for record in busy]
        filled[name] = np.average(shares, weights=[record.elapsed for record in busy])
    assert preempted["safe"] == 0
    assert filled["expected"] >= 0.90
    assert filled["safe"] < 0.85


@pytest.mark.parametrize("seqs", [2, 10, 20, 30, 60])
def test_what_is_wanted_beyond_the_cache_does_not_make_up_for_what_is_not(seqs: int):
    sized = deployment("llama-2-13b", "a100-40g", block_size=1)
    lengths = draw_lengths(*CHAT, 20_000)
    rng = np.random.default_rng(0)
    prompts, outputs = np.array(lengths.pairs).T
    drawn = rng.choice(len(outputs), size=(20_000, seqs), p=outputs / outputs.sum())  # who is there at a random step
    resident = prompts[drawn] + outputs[drawn] * rng.random(drawn.shape)
    assert lengths.mean_resident == pytest.approx(resident.mean(), rel=0.01)
    assert lengths.resident_deviation == pytest.approx(resident.std(), rel=0.02)
    filled = np.minimum(resident.sum(axis=1), sized.kv_tokens).mean() / sized.kv_tokens
    assert expected_fill(sized, lengths, seqs) == pytest.approx(filled, abs=0.01)


@pytest.mark.parametrize(
    ("hardware", "prompt", "output", "budget"),
    [("l4", "300", "300", 2048), ("a100-80g", "3000", "30", 8192), ("a100-40g", "2000", "60", 4096)],
)
def test_a_step_has_room_for_the_prompts_that_take_the_places_of_those_that_end(
    hardware: str, prompt: str, output: str, budget: int
):
    sized = make_plan(deployment("mistral-7b", hardware), draw_lengths(prompt, output, 1000), aim="expected")
    assert sized.deployment.max_num_batched_tokens == budget
    needed = rows_per_step(sized.expected, sized.lengths)
    assert needed == pytest.approx(sized.expected * (int(prompt) + int(output)) / int(output))
    assert budget / 2 < max(1.25 * needed, 1025) <= budget or budget == 8192


def test_the_expected_value_is_never_below_the_safe_one():
    sized = make_plan(deployment(), draw_lengths("512", "1", 1000))
    assert sized.expected == sized.safe == sized.deployment.kv_tokens // 528


def test_objectives_lower_the_batch_and_the_token_budget():
    lengths = draw_lengths(*CHAT, 20_000)
    base = deployment("codellama-13b", "a100-80g", tensor_parallel_size=2)
    cost = roofline(base, "distserve")
    free = make_plan(base, lengths, cost=cost)
    tight = make_plan(base, lengths, cost=cost, slos={"tpot": 30.0, "ttft": 1000.0})
    assert tight.deployment.max_num_seqs < free.deployment.max_num_seqs
    assert tight.deployment.max_num_batched_tokens < free.deployment.max_num_batched_tokens
    assert tight.limited_by == "the TPOT objective of 30 ms"
    limit, expected = tight.slos["tpot"]
    assert limit == 30.0
    assert 25.0 < expected <= 30.0
    impossible = make_plan(base, lengths, cost=cost, slos={"tpot": 1.0})
    assert impossible.deployment.max_num_seqs == 1
    assert impossible.slos["tpot"][1] > 1.0


def test_what_a_full_batch_is_expected_to_do_is_what_the_simulation_does():
    lengths = draw_lengths(*CHAT, 20_000)
    base = deployment("llama-2-13b", "a100-80g")
    sized = make_plan(base, lengths, cost=roofline(base, "distserve"))
    work = synthetic_workload(draw_lengths(*CHAT, 600, seed=9), clients=sized.deployment.max_num_seqs)
    outcome = setting(sized.deployment).run(work)
    begin, end = 0.2 * outcome.duration, 0.7 * outcome.duration  # neither filling nor draining
    tokens = sum(begin < time < end for record in outcome.requests for time in record.token_times)
    assert sized.output_throughput == pytest.approx(tokens / (end - begin), rel=0.1)


@pytest.mark.parametrize(("aim", "name"), [("safe", "safe"), ("expected", "expected"), ("worst", "worst")])
def test_the_flags_follow_the_aim(aim: str, name: str):
    sized = make_plan(deployment(), draw_lengths(*CHAT, 5000), aim=aim)
    assert sized.deployment.max_num_seqs == getattr(sized, name)
    assert f"--max-num-seqs {getattr(sized, name)} " in sized.flags("llama-3-8b")


def test_weights_that_do_not_fit_are_said_before_anything_else():
    result = CliRunner().invoke(plan_command, ["llama-2-70b", "--explain"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("the weights do not fit: on each of 1 × NVIDIA A100 80 GB (SXM) 137.95 GB")
    assert result.stdout == ""


def test_a_budget_for_less_than_one_sequence_is_said_with_what_would_fit():
    command = ["llama-3.1-70b", "--tensor-parallel-size", "2"]
    result = CliRunner().invoke(plan_command, command)
    assert "fewer than one sequence of --max-model-len 131072; lower --max-model-len to" in str(result.exception)
    tokens = str(result.exception).split("lower --max-model-len to ")[1].split()[0]
    assert CliRunner().invoke(plan_command, [*command, "--max-model-len", tokens]).exit_code == 0


def test_the_arithmetic_is_shown_and_adds_up(tmp_path):
    target = tmp_path / "plan.json"
    command = ["codellama-13b", "--tensor-parallel-size", "2", "--max-model-len", "4096", "--swap-space", "16"]
    result = CliRunner().invoke(plan_command, [*command, "--explain", "--json", str(target)])
    assert result.exit_code == 0, result.output
    for name in ("weights in layers", "KV budget", "KV bytes per token", "mean resident length", "max-num-seqs, safe"):
        assert f"\n{name}" in result.stdout
    assert "40 layers × 2 × 20 heads × 128 × 2 bytes" in result.stdout
    document = json.loads(target.read_text())
    device = document["per_device"]
    assert device["kv_bytes_per_token"] == 409_600
    assert device["kv_budget_bytes"] == device["usable_bytes"] - sum(
        device[key] for key in ("weight_bytes", "context_bytes", "activation_bytes")
    )
    assert document["command"] in result.stdout
    assert document["command"].startswith("chairlift serve codellama-13b --tensor-parallel-size 2 --dtype bfloat16 ")
    assert document["command"].endswith("--swap-space 16")
    assert str(document["max_num_seqs"]["safe"]) in document["command"]


@pytest.mark.parametrize(
    ("arguments", "bytes_per_token", "arithmetic", "flag"),
    [
        ([], 131_072, "32 layers × 2 × 8 heads × 128 × 2 bytes", False),
        (["--kv-cache-dtype", "bfloat16"], 131_072, "32 layers × 2 × 8 heads × 128 × 2 bytes", False),
        (["--kv-cache-dtype", "fp8"], 65_536, "32 layers × 2 × 8 heads × 128 × 1 bytes", False),
        (["--kv-cache-dtype", "int8"], 67_584, "32 layers × 2 × 8 heads × (128 × 1 bytes + a scale of 4)", True),
        # The cache's precision is not the weights': these have two bytes in it unless it is asked for.
        (["--dtype", "int8"], 131_072, "32 layers × 2 × 8 heads × 128 × 2 bytes", False),
    ],
)
def test_an_int8_cache_is_counted_with_its_scales_and_asked_for(
    arguments: list[str], bytes_per_token: int, arithmetic: str, flag: bool, tmp_path
):
    target = tmp_path / "plan.json"
    command = ["llama-3-8b", "--max-model-len", "4096", "--explain", "--json", str(target), *arguments]
    result = CliRunner().invoke(plan_command, command)
    assert result.exit_code == 0, result.output
    assert re.search(
        rf"^KV bytes per token +=.* {re.escape(arithmetic)}\n +=.* {bytes_per_token:,}$", result.stdout, re.M
    )
    document = json.loads(target.read_text())
    assert document["per_device"]["kv_bytes_per_token"] == bytes_per_token
    assert ("--kv-cache-dtype int8 " in document["command"]) is flag
    assert ("--kv-cache-dtype" in document["command"]) is flag
    assert document["command"] in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no model 'nothing'"),
        (["llama-2-7b", "--hardware", "tpu"], "there is no hardware 'tpu'"),
        (["llama-2-7b", "--dtype", "int3"], "--dtype must be one of bfloat16"),
        (["llama-2-7b", "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be one of"),
        (["llama-2-7b", "--tensor-parallel-size", "7"], "does not divide"),
        (["llama-2-7b", "--input-len", "many"], "'many' is no length"),
        (["llama-2-7b", "--trace", "/nowhere.csv"], "cannot read the trace"),
        (["llama-2-7b", "--engine", "sglang"], "no coefficients for the engine 'sglang'"),
        (["llama-2-7b", "--cost-model", "/nowhere.json"], "no cost model can be read"),
        (["llama-2-7b", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens"),
        (["llama-2-7b", "--gpu-memory-utilization", "0"], "--gpu-memory-utilization must be in"),
    ],
)
def test_bad_input_is_answered_with_what_to_change(arguments: list[str], message: str):
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError), result.exception
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-2-7b", "--trace", "x", "--input-len", "5"], "leave out --input-len"),
        (["llama-2-7b", "--json", "/nowhere/at/all.json"], "is no directory"),
        (["llama-2-7b", "--goodput", "speed:3"], "no objective"),
        (["llama-2-7b", "--engine", "distserve", "--cost-model", "x"], "give one of them"),
        ([], "Missing argument"),
    ],
)
def test_bad_usage_of_plan(arguments: list[str], message: str):
    result = CliRunner().invoke(plan_command, arguments)
    assert result.exit_code == 2
    assert message in result.output


# ---- searches ----


def open_loop(count: int = 300) -> object:
    return synthetic_workload(draw_lengths("200", "50", count), rate=1.0)


def test_the_largest_rate_is_met_and_a_larger_one_is_not():
    sized = deployment("llama-3-8b", "a100-80g", max_num_seqs=64)
    goal = Attainment({"ttft": 300.0, "tpot": 40.0}, 0.95)
    tried = {}

    def note(line: str) -> None:
        rate, verdict = line.split(" requests/s: ")
        tried[float(rate)] = verdict == "met"

    found = largest_rate(setting(sized), open_loop(), goal, note)
    assert found is not None
    assert max(rate for rate, met in tried.items() if met) == pytest.approx(found, rel=0.01)
    lowest_missed = min(rate for rate, met in tried.items() if not met)
    assert found < lowest_missed <= found * 1.03


def test_a_rate_that_no_request_could_meet_is_not_searched_for_ever():
    goal = Attainment({"ttft": 0.01}, 0.99)
    assert largest_rate(setting(deployment("llama-3-8b", "a100-80g")), open_loop(20), goal) is None


def test_the_fewest_replicas_meet_it_and_one_less_does_not():
    sized = deployment("llama-3-8b", "a100-80g", max_num_seqs=64)
    work = synthetic_workload(draw_lengths("200", "50", 400), rate=100.0)
    goal = Attainment({"ttft": 500.0, "tpot": 40.0}, 0.95)
    found = fewest_replicas(setting(sized), work, goal)
    assert found is not None
    assert found > 1

    def attained(replicas: int) -> float:
        outcome = setting(sized, replicas=replicas).run(work)
        return sum(meets(record, goal.slos) for record in outcome.requests) / 400

    assert attained(found) >= 0.95
    assert attained(found - 1) < 0.95


def test_the_best_limits_come_first():
    sized = deployment("llama-3-8b", "a100-80g")
    work = synthetic_workload(draw_lengths("200", "40", 80))
    tried = best_limits(setting(sized), work, {})
    best = max(limits.metrics["output_throughput"] for limits in tried)
    assert tried[0].metrics["output_throughput"] >= 0.99 * best
    assert {limits.max_num_seqs for limits in tried} == {8, 16, 32, 64, 128, 256, 512}
    assert all(limits.max_num_batched_tokens >= limits.max_num_seqs for limits in tried)
    assert tried[-1].max_num_seqs == 8


def test_limits_whose_activations_leave_no_room_are_passed_over():
    noted = []
    tight = deployment("llama-3-8b", "l4", max_model_len=2048, gpu_memory_utilization=0.74)
    tried = best_limits(setting(tight), synthetic_workload(draw_lengths("50", "5", 8)), {}, noted.append)
    kept = {limits.max_num_batched_tokens for limits in tried}
    assert 256 in kept
    assert 8192 not in kept
    assert any("8192 tokens: its activations leave no room" in line for line in noted)
    with pytest.raises(ConfigError, match="the weights do not fit"):
        best_limits(setting(deployment("llama-2-70b")), synthetic_workload(draw_lengths("50", "5", 8)), {})


def test_objectives_are_needed_and_checked():
    with pytest.raises(ConfigError, match="a search needs objectives"):
        Attainment({}, 0.99)
    with pytest.raises(ConfigError, match=r"--attainment must be in \(0, 1\], got 1.5"):
        Attainment({"ttft": 1.0}, 1.5)


def test_what_a_million_tokens_cost():
    metrics = {"output_throughput": 1000.0, "total_token_throughput": 4000.0}
    prices = cost_per_million(metrics, 3.6, 2)
    assert prices == pytest.approx({"price_per_million_output_tokens": 2.0, "price_per_million_tokens": 0.5})


# ---- simulate ----


def run_simulate(*arguments: str):
    return CliRunner().invoke(simulate_command, arguments)


def test_static_and_continuous_with_a_report(tmp_path):
    numbers, report = tmp_path / "n.json", tmp_path / "r.html"
    result = run_simulate(
        *("llama-2-7b", "--clients", "12", "--num-requests", "40", "--static-batch-size", "4", "--price", "2"),
        *("--input-len", "100", "--output-len", "uniform:5:60", "--goodput", "ttft:2000", "e2el:4000"),
        *("--replicas", "2", "--json", str(numbers), "--html", str(report), "--save-detailed"),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    document = json.loads(numbers.read_text())
    assert document["schema"] == "chairlift.simulate/1"
    assert document["simulated"]["hardware"] == "a100-80g"
    assert document["simulated"]["replicas"] == 2
    assert "machine" not in document
    static, continuous = document["policies"]
    assert [static["name"], continuous["name"]] == ["static-4", "continuous-128"]
    assert static["metrics"]["rows_ended"]["median"] > 0 == continuous["metrics"]["rows_ended"]["median"]
    assert continuous["metrics"]["completed"]["median"] == 40
    assert continuous["metrics"]["output_throughput"]["median"] > static["metrics"]["output_throughput"]["median"]
    assert len(continuous["repeats"][0]["requests"]) == 40
    assert "for a million output tokens" in result.stdout
    said = " ".join(result.stdout.split())
    assert "simulated on 2 replicas of 1 × NVIDIA A100 80 GB (SXM), behind least-load routing" in said
    assert "<html" in report.read_text()


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    documents = []
    for seed in ("1", "1", "2"):
        target = tmp_path / f"{len(documents)}.json"
        run_simulate("llama-2-7b", "--request-rate", "5", "--num-requests", "30", "--seed", seed, "--json", str(target))
        documents.append(json.loads(target.read_text())["policies"])
    assert documents[0] == documents[1] != documents[2]


def test_a_search_from_the_command_line(tmp_path):
    target = tmp_path / "found.json"
    result = run_simulate(
        *("llama-3-8b", "--find", "replicas", "--request-rate", "60", "--num-requests", "100", "--price", "2"),
        *("--input-len", "200", "--output-len", "40", "--goodput", "ttft:500", "--json", str(target)),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(target.read_text())
    assert f"fewest replicas: {found['replicas']}, with which 0.99 of the requests meet ttft ≤ 500 ms" in result.stdout
    assert found["price_per_million_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b", "--request-rate", "-1"], "the request rate must be above 0"),
        (["llama-3-8b", "--request-rate", "1", "--burstiness", "0"], "the burstiness must be above 0"),
        (["llama-3-8b", "--routing", "random"], "--routing must be one of"),
        (["llama-3-8b", "--find", "rate"], "a search needs objectives"),
        (["llama-3-8b", "--max-num-seqs", "100", "--max-num-batched-tokens", "50"], "must be at least --max-num-seqs"),
        (["llama-2-70b"], "the weights do not fit"),
        (["--fit", "/nowhere.jsonl"], "cannot read the step log"),
        (["llama-3-8b", "--trace", "/nowhere.jsonl"], "cannot read the trace"),
        (["llama-3-8b", "--num-requests", "3000", "--html", "x.html"], "take --num-requests 2000 or fewer"),
    ],
)
def test_bad_input_to_simulate_is_answered_with_what_to_change(arguments: list[str], message: str):
    result = run_simulate(*arguments)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL to simulate"),
        (["llama-3-8b", "--clients", "3", "--request-rate", "1"], "--request-rate and --clients are different ways"),
        (["llama-3-8b", "--clients", "3", "--find", "rate"], "leave out --clients"),
        (["llama-3-8b", "--static-batch-size", "3", "--find", "limits"], "leave out --static-batch-size"),
        (["llama-3-8b", "--save-detailed"], "--json, which is not given"),
        (["llama-3-8b", "--save-cost", "x"], "--save-cost goes with"),
        (["llama-3-8b", "--max-num-seqs", "0"], "at least 1"),
        (["llama-3-8b", "--replicas", "0"], "--replicas"),
    ],
)
def test_bad_usage_of_simulate(arguments: list[str], message: str):
    result = run_simulate(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_this_machine_needs_a_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    result = run_simulate("smollm2", "--hardware", "this")
    assert "run chairlift simulate smollm2 --calibrate first" in str(result.exception)
    result = CliRunner().invoke(plan_command, ["smollm2", "--hardware", "this", "--goodput", "tpot:50"])
    assert "this machine is not calibrated" in str(result.exception)
    assert CliRunner().invoke(plan_command, ["smollm2", "--hardware", "this"]).exit_code == 0


def test_step_times_of_another_precision_are_refused(tmp_path):
    steps = [(StepWork(n, n, n, 10 * n), 0.001 * n + 0.002) for n in range(1, 40)]
    about = {"model": "m", "device": "cpu", "capacity": {}, "source": "a test"}
    fit_cost(steps, dtype="float32", **about).save(tmp_path / "cost.json")
    command = ["llama-3-8b", "--cost-model", str(tmp_path / "cost.json"), "--num-requests", "5", "--output-len", "5"]
    result = run_simulate(*command)
    assert "the step times are those of float32, and --dtype is bfloat16" in str(result.exception)
    assert run_simulate(*command, "--dtype", "float32").exit_code == 0
    fit_cost(steps, dtype="", **about).save(tmp_path / "cost.json")
    assert run_simulate(*command).exit_code == 0


def test_help_names_all_the_hardware():
    text = " ".join(CliRunner().invoke(plan_command, ["--help"]).output.split())
    assert all(name in text for name in HARDWARE)
