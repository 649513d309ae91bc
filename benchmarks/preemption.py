"""What each way to make room costs when KV memory is short: on the lengths of a real conversation service.

    python benchmarks/preemption.py

The same requests, sent all at once, run on one model and one executor under each preemption mode and victim rule, with
a KV cache far too small for all that could run, and once with enough as the reference. The settings take turns, repeat
after repeat, so that the machine's noise hits all of them. Lengths are every 97th request of Azure's conversation trace
of 2023 (benchmarks/data/), scaled to the model. Printed: preemptions, tokens recomputed, megabytes moved, and output
tokens/s and P99 latency as medians with ranges.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chairlift.config import EngineConfig
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import WallClock
from chairlift.execution.local import LocalExecutor
from chairlift.measure.drive import run_workload
from chairlift.measure.metrics import run_metrics
from chairlift.measure.records import Run
from chairlift.measure.workload import Workload, make_requests

LENGTHS = Path(__file__).parent / "data" / "azure_conv_lengths.csv"

# Settings beside those of the engine's defaults. The first is the reference, with memory for all.
SETTINGS: dict[str, dict[str, object]] = {
    "enough memory": {},
    "auto, latest (default)": {},
    "auto, least work": {"preemption_victim": "least-work"},
    "recompute, latest": {"preemption_mode": "recompute"},
    "recompute, least work": {"preemption_mode": "recompute", "preemption_victim": "least-work"},
    "swap, latest": {"preemption_mode": "swap"},
    "swap, least work": {"preemption_mode": "swap", "preemption_victim": "least-work"},
    "auto, admission reserve": {"admission_reserve": True},
}


def make_workload(arguments: argparse.Namespace, vocab_size: int) -> Workload:
    with LENGTHS.open(newline="") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    rng = np.random.default_rng(arguments.seed)
    drawn = [rows[i] for i in rng.permutation(len(rows))[: arguments.requests]]
    longest = arguments.max_model_len
    lengths = []
    for context, generated in drawn:
        output = min(max(4, round(generated * arguments.scale)), longest // 2)
        lengths.append((min(max(4, round(context * arguments.scale)), longest - output), output))
    return Workload("conversation", "Azure's conversation trace, all at once.", make_requests(lengths, vocab_size, rng))


def run_once(workload: Workload, config: EngineConfig, executor: LocalExecutor, num_blocks: int) -> Run:
    capacity = replace(executor.capacity(), num_blocks=num_blocks)
    return run_workload(workload, build_scheduler(config, capacity), executor, WallClock())


def spread(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def report(name: str, runs: Sequence[Run], block_bytes: int, reference: float) -> None:
    metrics = [run_metrics(run) for run in runs]
    records = [step.record for step in runs[0].steps]
    moved = sum(record.blocks_swapped_out + record.blocks_swapped_in for record in records) * block_bytes / 1e6
    throughput = [m["output_throughput"] for m in metrics]
    print(
        f"{name:24}{sum(r.preempted for r in records):6}{sum(r.rows.recomputed for r in records):9,}{moved:9.0f}"
        f"{spread(throughput):>24}{statistics.median(throughput) / reference:7.2f}"
        f"{spread([m['p99_e2el_ms'] / 1000 for m in metrics], 2):>24}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--scale", type=float, default=0.25, help="factor on the trace's lengths")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-blocks", type=int, default=160, help="of 16 tokens, where memory is short")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    base = EngineConfig(
        model=arguments.model, max_model_len=arguments.max_model_len, max_num_seqs=arguments.requests, swap_space=4.0
    )
    executor = LocalExecutor(base)
    capacity = executor.capacity()
    block_bytes = capacity.block_size * capacity.kv_bytes_per_token
    workload = make_workload(arguments, capacity.vocab_size)
    run_once(workload.head(4), base, executor, capacity.num_blocks)
    runs: dict[str, list[Run]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.repeats):
        for name, changes in SETTINGS.items():
            blocks = capacity.num_blocks if name == "enough memory" else arguments.num_blocks
            runs[name].append(run_once(workload, replace(base, **changes), executor, blocks))  # type: ignore[arg-type]

    print(f"model {capacity.model}, {capacity.dtype} on {capacity.device}; {arguments.repeats} repeats in turn")
    print(
        f"{arguments.requests} requests: {workload.prompt_tokens:,} prompt and {workload.output_tokens:,} output tokens"
    )
    print(f"{arguments.num_blocks} blocks of {capacity.block_size} tokens; measured here: a token is recomputed in")
    print(
        f"{capacity.recompute_seconds_per_token * 1e6:.0f} µs, a block moved in "
        f"{capacity.swap_seconds_per_block * 1e6:.0f} µs\n"
    )
    print(f"{'':24}{'put':>6}{'tokens':>9}{'MB':>9}{'output':>24}{'':7}{'P99':>24}")
    print(f"{'':24}{'aside':>6}{'again':>9}{'moved':>9}{'tokens/s':>24}{'ratio':>7}{'seconds':>24}")
    reference = statistics.median(run_metrics(run)["output_throughput"] for run in runs["enough memory"])
    for name, done in runs.items():
        report(name, done, block_bytes, reference)


if __name__ == "__main__":
    main()
