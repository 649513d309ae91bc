"""What the scheduler costs: plan and commit of a decode step, with an executor that does nothing.

    python benchmarks/scheduler.py

One row for each number of running sequences and of waiting ones: the median and the 99th percentile of the time that
``plan`` and ``commit`` take together, over many steps. The cost should grow no worse than linearly with the running,
and not at all with the queue. The reference is the smallest case of the same run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from chairlift import SamplingParams
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.plan import StepPlan, StepResult
from chairlift.scheduling.request import Request

BLOCK_SIZE = 16
PROMPT, OUTPUT = 200, 100_000


def execute(plan: StepPlan) -> StepResult:
    return StepResult([7] * sum(chunk.sampling is not None for chunk in plan.chunks), 0.0)


def full_scheduler(running: int, waiting: int) -> ContinuousScheduler:
    """A scheduler in the middle of its work: so many decode, and so many wait for a place."""
    num_blocks = running * 400
    kv = KVManager(num_blocks, BLOCK_SIZE, prefix_cache=PrefixCache(num_blocks, BLOCK_SIZE))
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=max(8192, running))
    scheduler = ContinuousScheduler(config, kv, max_model_len=6000)
    params = SamplingParams(max_tokens=OUTPUT, seed=0, temperature=0)
    for i in range(running + waiting):
        scheduler.add(Request(str(i), [(i * 31 + t) % 50_000 for t in range(PROMPT)], params))
    prefilling = True
    while prefilling:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, execute(plan), 0.0)
        prefilling = plan.rows.prefill > 0
    return scheduler


def step_times(scheduler: ContinuousScheduler, steps: int) -> list[float]:
    """Seconds of plan and commit together, for each step."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        result = execute(plan)
        committing = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        times.append(time.perf_counter() - committing + planned - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    reference = None
    print(f"{'running':>8}{'waiting':>9}{'median µs':>12}{'p99 µs':>10}{'ratio':>8}   medians of {steps} decode steps")
    for running, waiting in ((32, 0), (64, 0), (128, 0), (256, 0), (256, 1000), (256, 10_000)):
        scheduler = full_scheduler(running, waiting)
        gc.collect()
        gc.freeze()  # what was made here is no garbage of the steps
        times = sorted(step_times(scheduler, steps))
        median, p99 = statistics.median(times) * 1e6, times[int(len(times) * 0.99)] * 1e6
        reference = reference or median
        print(f"{running:8}{waiting:9}{median:12.0f}{p99:10.0f}{median / reference:8.2f}")


if __name__ == "__main__":
    main()
