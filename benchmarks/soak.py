"""Random lives of the scheduler for as many steps as asked: the suite's property test, run for longer.

    python benchmarks/soak.py --steps 1000000

Each life has a random pool, host, budget, policy, preemption mode and victim rule, and random arrivals, aborts (in
flight too) and executor failures. After every step the books must add up, and every answer must be right to the token;
see tests/property/test_scheduling.py. Prints how many steps were executed, and what happened in them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "property"))

from test_scheduling import ContinuousMachine, StaticMachine

EXAMPLES_AT_A_TIME = 500


def counting(machine: type, counts: Counter[str]) -> type:
    """The machine, which adds what its plans held when a life ends."""

    class Counting(machine):  # type: ignore[misc]
        def teardown(self) -> None:
            super().teardown()
            for plan in self.executor.plans if hasattr(self, "executor") else ():
                counts["steps"] += 1
                counts["rows"] += plan.rows.total
                counts["rows recomputed"] += plan.rows.recomputed
                counts["preemptions"] += len(plan.preempted)
                counts["blocks swapped out"] += len(plan.swap_out)
                counts["blocks swapped in"] += len(plan.swap_in)
                counts["tokens found in the prefix cache"] += plan.num_cached_tokens
            counts["requests"] += len(getattr(self, "requests", ()))

    return Counting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    profile = settings(
        max_examples=EXAMPLES_AT_A_TIME,
        stateful_step_count=50,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    started = time.monotonic()
    for machine, share in ((ContinuousMachine, 0.8), (StaticMachine, 0.2)):
        counts: Counter[str] = Counter()
        while counts["steps"] < steps * share:
            run_state_machine_as_test(counting(machine, counts), settings=profile)
            so_far = ", ".join(f"{value:,} {name}" for name, value in counts.items())
            print(f"{machine.__name__}: {so_far} ({time.monotonic() - started:,.0f} s)", flush=True)
    print(f"no failure in {time.monotonic() - started:,.0f} s")


if __name__ == "__main__":
    main()
