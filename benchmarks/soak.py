"""Random lives of the scheduler for as many steps as asked: the suite's property test, run for longer.

    python benchmarks/soak.py --steps 1000000

Each life has a random pool, host, budget, policy, preemption mode and victim rule, and random arrivals, aborts (in
flight too), failing steps and requests that cannot go on. After every act the books must add up, and every answer
must be right to the token: it is the machine of tests/property/test_scheduling.py, driven by a plain random generator,
many times as fast as one that keeps what it takes to shrink a failure. Prints how many steps were executed, and
what happened in them; a failure names the life, and ``--first LIFE --steps 1`` runs that one again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "property"))

from test_scheduling import ContinuousMachine, SchedulerMachine, StaticMachine, live

REPORT_EVERY = 50_000  # steps


def count(machine: SchedulerMachine, counts: Counter[str]) -> None:
    for plan in machine.executor.plans:
        counts["steps"] += 1
        counts["rows"] += plan.rows.total
        counts["rows recomputed"] += plan.rows.recomputed
        counts["preemptions"] += len(plan.preempted)
        counts["blocks swapped out"] += len(plan.swap_out)
        counts["blocks swapped in"] += len(plan.swap_in)
        counts["tokens found in the prefix cache"] += plan.num_cached_tokens
    counts["failed steps"] += machine.num_failed_steps
    counts["requests"] += len(machine.requests)
    counts["lives"] += 1


def run(kind: type[SchedulerMachine], steps: float, first: int) -> None:
    counts: Counter[str] = Counter()
    started, reported, seed = time.monotonic(), 0, first
    while counts["steps"] < steps:
        try:
            machine = live(kind, seed)
        except BaseException:
            print(f"{kind.__name__}, life {seed}:", file=sys.stderr)
            raise
        seed += 1
        count(machine, counts)
        if counts["steps"] >= min(reported + REPORT_EVERY, steps):
            reported = counts["steps"]
            so_far = ", ".join(f"{value:,} {name}" for name, value in counts.items())
            print(f"{kind.__name__}: {so_far} ({time.monotonic() - started:,.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, metavar="LIFE", help="the first life's number, its seed")
    arguments = parser.parse_args()
    for kind, share in ((ContinuousMachine, 0.8), (StaticMachine, 0.2)):
        run(kind, arguments.steps * share, arguments.first)
    print("no failure")


if __name__ == "__main__":
    main()
