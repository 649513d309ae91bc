"""The simulator against measurements: fits its coefficients, prints its errors, and times it.

python benchmarks/simulator.py fit          writes chairlift/simulate/data/coefficients.json from the measurements
python benchmarks/simulator.py errors       step times, operators, published throughput: the tables of docs/simulate.md
python benchmarks/simulator.py alone        step times again, with all coefficients fitted to each configuration alone
python benchmarks/simulator.py speed FILE   a whole trace on one simulated A100
python benchmarks/simulator.py engine       calibrates this machine's engine, then measures what it predicts
python benchmarks/simulator.py case-study   looks for the settings of docs/case-study.md, for ten minutes
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from chairlift.config import EngineConfig
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import VirtualClock, WallClock
from chairlift.execution.local import LocalExecutor
from chairlift.measure.drive import run_workload
from chairlift.measure.metrics import Metrics, request_metrics
from chairlift.measure.scenarios import ScenarioOptions, build_scenario
from chairlift.measure.workload import Workload, make_requests
from chairlift.simulate import validation
from chairlift.simulate.calibrate import calibrate
from chairlift.simulate.case_study import REFERENCES, CaseResult, CaseSetting, run_setting
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import (
    EngineCoefficients,
    ProductCoefficients,
    engine_coefficients,
    engine_names,
    product_coefficients,
    roofline,
)
from chairlift.simulate.executor import SimulatedExecutor
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.published import PUBLISHED
from chairlift.simulate.search import Setting, outcome_metrics
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import trace_workload

COEFFICIENTS = Path(__file__).parent.parent / "chairlift" / "simulate" / "data" / "coefficients.json"
SMALLEST = 1e-12  # coefficients are positive; what a fit drives below this is written as 0


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> np.ndarray:
    """Levenberg and Marquardt, over the logarithms, so that every coefficient stays positive."""
    x = np.log(np.asarray(start, float))
    current = residuals(np.exp(x))
    damping = 1e-2
    for _ in range(300):
        jacobian = np.stack([(residuals(np.exp(x + 1e-6 * e)) - current) / 1e-6 for e in np.eye(len(x))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        before = current @ current
        for _ in range(20):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            moved = np.maximum(x + np.clip(step, -2, 2), np.log(SMALLEST))
            tried = residuals(np.exp(moved))
            if tried @ tried < before:
                x, current, damping = moved, tried, damping / 3
                break
            damping *= 4
        if before - current @ current < 1e-10 * before:
            break
    return np.exp(x)


def fit_products(device: str) -> ProductCoefficients:
    points = validation.operator_points(device)
    measured = np.array([point.seconds for point in points])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array(validation.predict_operators(points, _products(x))) / measured - 1

    return _products(least_squares(residuals, [0.7, 0.8, 5e-6, 1.5]))


def _products(x: Sequence[float]) -> ProductCoefficients:
    compute, memory, launch, sharpness = (float(value) for value in x)
    return ProductCoefficients(compute=compute, memory=memory, launch=launch, sharpness=sharpness)


ENGINE_START = EngineCoefficients(
    step=5e-3,
    layer=1e-4,
    sequence=1e-5,
    parallel=3e-3,
    parallel_doubling=1e-3,
    products=1.0,
    pointwise=3.0,
    kv_read=0.7,
    attention=0.3,
    collective=2e-5,
    link=0.3,
    link_growth=0.5,
    sharpness=1.5,
)


def fit_engine(
    points: Sequence[validation.StepPoint],
    products: ProductCoefficients,
    start: EngineCoefficients = ENGINE_START,
    power: int = 1,
) -> EngineCoefficients:
    """Least squares of the relative errors to this power: the higher, the more the worst of them count."""
    measured = np.array([point.seconds for point in points])
    names = [field.name for field in fields(EngineCoefficients)]

    def residuals(x: np.ndarray) -> np.ndarray:
        engine = EngineCoefficients(**dict(zip(names, map(float, x), strict=True)))
        errors = np.array(validation.predict_steps(points, products, engine)) / measured - 1
        return np.asarray(errors * np.abs(10 * errors) ** (power - 1))

    found = least_squares(residuals, [max(1e-9, getattr(start, name)) for name in names])
    return EngineCoefficients(**{n: float(x) if x > 1e-9 else 0.0 for n, x in zip(names, found, strict=True)})


def rounded(coefficients: ProductCoefficients | EngineCoefficients) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(coefficients).items()}


def fit() -> None:
    products = {device: fit_products(device) for device in validation.OPERATOR_HARDWARE}
    engines = {
        engine: fit_engine(validation.step_points(engine), products["a100"]) for engine in ("distserve", "vllm-0.2.3")
    }
    content = {
        "products": {name: rounded(value) for name, value in products.items()},
        "engines": {name: rounded(value) for name, value in engines.items()},
    }
    COEFFICIENTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(COEFFICIENTS.read_text(encoding="utf-8"))


def errors() -> None:
    print("step times on A100-80G")
    for engine in engine_names():
        for (model, devices, phase), error in validation.step_errors(engine).items():
            print_errors(f"{engine:<11} {model:<17} {devices or '':<2} {phase:<8}", error)
    print("\nheld out: eight devices")
    for engine in engine_names():
        for (model, devices, phase), error in validation.step_errors(engine, validation.HELD_OUT).items():
            if devices:
                print_errors(f"{engine:<11} {model:<17} {devices:<2} {phase:<8}", error)
    print("\nmatrix products of one layer")
    for device in validation.OPERATOR_HARDWARE:
        for devices, error in validation.operator_errors(device).items():
            print_errors(f"{device:<5} tensor parallel {devices or 'all':<4}", error)
    print("\npublished output tokens/s on A100-80G, published and simulated")
    for published in PUBLISHED:
        simulated = published.simulate()
        deviation = simulated / published.output_throughput - 1
        print(f"{published.name:<46} {published.output_throughput:6,.0f} {simulated:6,.0f} {deviation:+7.1%}")


def alone() -> None:
    """What the form of the model allows: all coefficients fitted to one configuration, to lower its worst errors."""
    products = product_coefficients("a100")
    for name in engine_names():
        for configuration, most_tokens in validation.MEASURED.items():
            points = validation.step_points(name, {configuration: most_tokens})
            fitted = fit_engine(points, products, engine_coefficients(name), power=2)
            predicted = validation.predict_steps(points, products, fitted)
            error = validation.summarize(predicted, [point.seconds for point in points])
            print_errors(f"{name:<11} {configuration[0]:<17} {configuration[1]}", error)


def print_errors(name: str, error: validation.Errors) -> None:
    print(
        f"{name} {error.count:5} points: mean {error.mean_absolute:6.1%}, bias {error.bias:+6.1%}, "
        f"P95 {error.p95:6.1%}, worst {error.worst:6.1%}, within 10 %: {error.within_tenth:.0%}"
    )


def speed(trace: Path) -> None:
    deployment = Deployment(
        model=MODELS["llama-3-8b"], hardware=HARDWARE["a100-80g"], max_model_len=8192, max_num_seqs=256
    )
    setting = Setting(deployment=deployment, cost=roofline(deployment, engine_names()[0]))
    for limit in (2500, 5000, 10_000, None):
        began, cpu = perf_counter(), process_time()
        workload = trace_workload(trace, max_length=8192, limit=limit)
        outcome = setting.run(workload)
        metrics = outcome_metrics(outcome)
        used, cpu = perf_counter() - began, process_time() - cpu
        rows = sum(record.rows.decode + record.rows.prefill for record in outcome.records[0])
        scheduled = workload.output_tokens + len(workload.requests)
        print(
            f"{len(workload.requests):6,} requests, {rows:11,} rows, {metrics['steps']:8,.0f} steps: {used:5.1f} s "
            f"({cpu:.1f} s of CPU), {cpu / scheduled * 1e6:.2f} µs of CPU a token scheduled"
        )


class CPUClock:
    """Counts the CPU time of this process, and the time that it sleeps on purpose.

    With one compute thread this is the time that the engine would take if nothing else ran on the machine.
    """

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        return process_time() + self._slept

    def advance(self, seconds: float) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


def engine(repeats: int, cpu_time: bool) -> None:
    """Calibration and measurement in turn, so that whatever else the machine does hits both."""
    config = EngineConfig(
        model="smollm2", max_num_seqs=32, enable_prefix_caching=False, num_threads=1 if cpu_time else None
    )
    executor = LocalExecutor(config)
    capacity = executor.capacity()
    scenarios = engine_scenarios(capacity.vocab_size)
    results: dict[str, list[tuple[Metrics, Metrics]]] = {name: [] for name in scenarios}
    for repeat in range(repeats):
        cost = calibrate(executor, config, repeats=1, seed=repeat, now=process_time if cpu_time else perf_counter)
        print(f"repeat {repeat + 1}: {cost.steps} steps, mean error {cost.mean_error:.1%}", flush=True)
        for name, workload in scenarios.items():
            real, clock = CPUClock() if cpu_time else WallClock(), VirtualClock()
            sleep = real.sleep if isinstance(real, CPUClock) else time.sleep
            ran = run_workload(workload, build_scheduler(config, capacity), executor, real, sleep=sleep)
            simulation = SimulatedExecutor(capacity, cost)
            said = run_workload(workload, build_scheduler(config, capacity), simulation, clock, sleep=clock.advance)
            results[name].append(
                (request_metrics(ran.requests, ran.duration), request_metrics(said.requests, said.duration))
            )
            print_comparison(name, results[name][-1:])
    print("\nmedians over the repeats")
    for name, pairs in results.items():
        print_comparison(name, pairs)


def engine_scenarios(vocab_size: int) -> dict[str, Workload]:
    """None of them is of the calibration's shapes."""
    options = ScenarioOptions(max_length=512, vocab_size=vocab_size, num_requests=64)
    chat = draw_lengths("lognormal:100:0.8:400", "lognormal:40:0.7:150", 36, seed=11)
    requests = make_requests(chat.pairs, vocab_size, np.random.default_rng(3))
    return {"peak-50": build_scenario("peak-50", options), "chat-12": Workload("chat-12", "", requests, 12)}


def print_comparison(name: str, pairs: Sequence[tuple[Metrics, Metrics]]) -> None:
    for key in ("output_throughput", "mean_e2el_ms", "p99_e2el_ms"):
        took, said = median(ran[key] for ran, _ in pairs), median(said[key] for _, said in pairs)
        print(
            f"  {name:<8} {key:<18} measured {took:9,.1f}, simulated {said:9,.1f}, {said / took - 1:+.1%}", flush=True
        )


def case_study(seconds: float) -> None:
    """Random walks uphill from the best setting found so far, one for each engine and each way to count tokens."""
    for name in engine_names():
        for tokens in ("total_token_throughput", "output_throughput"):
            rng = random.Random(7)
            current, best = (100.0, 0.7, 90.0, 0.6, 600.0, 16), math.inf
            tried = current
            until = perf_counter() + seconds / 4
            while perf_counter() < until:
                prompt, prompt_cv, output, output_cv, cap, batch = tried
                setting = CaseSetting(
                    title="tried",
                    engine=name,
                    prompt=f"lognormal:{prompt:.0f}:{prompt_cv:.2f}:2900",
                    output=f"lognormal:{output:.0f}:{output_cv:.2f}:{cap:.0f}",
                    static_batch_size=batch,
                    tokens=tokens,
                )
                result = run_setting(setting, requests_per_client=8)
                error = case_error(result)
                if error < best:
                    current, best = tried, error
                    figures = ", ".join(f"{result.value(reference):,.4g}" for reference in REFERENCES)
                    print(f"{best:.3f} {setting}\n      {figures}", flush=True)
                tried = (
                    max(10.0, current[0] * rng.lognormvariate(0, 0.3)),
                    min(2.0, current[1] * rng.lognormvariate(0, 0.3)),
                    max(8.0, current[2] * rng.lognormvariate(0, 0.25)),
                    min(3.0, current[3] * rng.lognormvariate(0, 0.35)),
                    min(1100.0, max(60.0, current[4] * rng.lognormvariate(0, 0.4))),
                    max(1, min(50, round(current[5] * rng.choice((0.5, 0.75, 1.0, 1.0, 1.3, 2.0))))),
                )


def case_error(result: CaseResult) -> float:
    """Root mean square of the logarithms of simulated over reported."""
    logs = [math.log(max(1e-9, result.ratio(reference))) for reference in REFERENCES]
    bounded = [min(0.0, log) if r.at_least else log for log, r in zip(logs, REFERENCES, strict=True)]
    return math.sqrt(sum(log * log for log in bounded) / len(bounded))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "errors", "alone", "speed", "engine", "case-study"))
    parser.add_argument("trace", nargs="?", type=Path, help="for speed: Azure CSV or Mooncake JSONL")
    parser.add_argument("--repeats", type=int, default=5, help="for engine")
    parser.add_argument("--cpu-time", action="store_true", help="for engine: one thread, counting CPU time")
    parser.add_argument("--seconds", type=float, default=600, help="for case-study")
    arguments = parser.parse_args()
    if arguments.what == "speed" and arguments.trace is None:
        parser.error("speed needs a trace")
    commands: dict[str, Callable[[], None]] = {
        "fit": fit,
        "errors": errors,
        "alone": alone,
        "speed": lambda: speed(arguments.trace),
        "engine": lambda: engine(arguments.repeats, arguments.cpu_time),
        "case-study": lambda: case_study(arguments.seconds),
    }
    commands[arguments.what]()


if __name__ == "__main__":
    main()
