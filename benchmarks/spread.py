"""How much continuous batching gains with the spread of output lengths: a sweep, and its picture.

    python benchmarks/spread.py --picture docs/spread.svg                     # counts steps: exact, on any machine
    python benchmarks/spread.py --model smollm2 --picture measured.svg        # measures a model

Prompts and the mean output length stay the same. Only the spread of the outputs changes, from all equal to a few that
are many times the rest: lengths follow a gamma distribution whose coefficient of variation is swept.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from matplotlib.figure import Figure

from chairlift.config import EngineConfig
from chairlift.engine.executor import Capacity, Executor
from chairlift.measure.compare import Policy, compare
from chairlift.measure.workload import Workload, make_requests
from chairlift.scheduling.plan import StepPlan, StepResult

MEASURED = ("output_throughput", "p99_e2el_ms")
PROMPT, MEAN_OUTPUT, LONGEST_OUTPUT = 32, 32, 400


class CountingExecutor:
    """Computes nothing, and has room for everything."""

    def capacity(self) -> Capacity:
        return Capacity(num_blocks=100_000, block_size=16, max_model_len=1024, vocab_size=1000)

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([0] * sum(chunk.sampling is not None for chunk in plan.chunks), elapsed=0.0)

    def close(self) -> None:
        pass


def lengths(count: int, cv: float, seed: int) -> list[tuple[int, int]]:
    """Prompts of one length, and lognormal outputs with one mean and the given spread, in random order."""
    sigma = np.sqrt(np.log(1 + cv**2))
    shares = (np.random.default_rng(seed).permutation(count) + 0.5) / count
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    outputs = np.exp(sigma * normal)
    outputs *= MEAN_OUTPUT / outputs.mean()
    return [(PROMPT, int(min(LONGEST_OUTPUT, max(1, round(output))))) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="measure this one, instead of counting steps")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--static-batch-size", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--cv", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = EngineConfig(num_threads=options.num_threads, max_model_len=1024)
    executor: Executor = CountingExecutor()
    if options.model:
        from chairlift.execution.local import LocalExecutor

        config = replace(config, model=options.model)
        executor = LocalExecutor(config)
    rows = []
    for cv in options.cv:
        rng = np.random.default_rng(0)
        requests = make_requests(lengths(options.num_requests, cv, 0), executor.capacity().vocab_size, rng)
        workload = Workload(f"spread {cv:g}", f"Outputs with a coefficient of variation of {cv:g}.", requests)
        outputs = [request.output_tokens for request in requests]
        for seats in options.max_num_seqs:
            policies = [Policy("static", options.static_batch_size), Policy("continuous", seats)]
            comparison = compare(workload, executor, config, policies, repeats=options.repeats)
            static, continuous = comparison.results
            row = {
                "cv": float(np.std(outputs) / np.mean(outputs)),
                "max_num_seqs": seats,
                "step_ratio": static.median("steps") / continuous.median("steps"),
                "static_useful_share": static.median("useful_share"),
            }
            if options.model:  # else there are no times worth telling
                row |= {f"{key}_ratio": continuous.median(key) / static.median(key) for key in MEASURED}
            rows.append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
    executor.close()
    if options.json:
        options.json.write_text(json.dumps({"static_batch_size": options.static_batch_size, "rows": rows}, indent=1))
    if options.picture:
        ratio, label = (
            ("output_throughput_ratio", "output tokens/s, over")
            if options.model
            else ("step_ratio", "forward passes, times fewer than")
        )
        draw(rows, ratio, f"{label} static {options.static_batch_size}", options.picture)


def draw(rows: list[dict], ratio: str, label: str, file: Path) -> None:
    """How much better than static batching, by the spread; a line for each number of places."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axis = figure.subplots()
    for seats in dict.fromkeys(row["max_num_seqs"] for row in rows):
        chosen = [row for row in rows if row["max_num_seqs"] == seats]
        x, y = [row["cv"] for row in chosen], [row[ratio] for row in chosen]
        axis.plot(x, y, marker="o", label=f"continuous, {seats} places")
    axis.axhline(1, color="0.5", linewidth=1)
    axis.set_xlabel("spread of output lengths (standard deviation / mean)")
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(file, metadata={"Date": None, "Creator": None}, facecolor="white")


if __name__ == "__main__":
    main()
