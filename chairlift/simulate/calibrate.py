"""Fitting a cost model to an engine: the one on this machine, or one whose step log is at hand."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.config import EngineConfig
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import WallClock
from chairlift.engine.executor import Capacity, Executor
from chairlift.measure.drive import run_workload
from chairlift.measure.workload import Workload, make_requests
from chairlift.scheduling.plan import StepPlan, StepResult
from chairlift.scheduling.work import StepWork, step_work
from chairlift.simulate.measured import CalibrationError, MeasuredCost, fit_cost

# Clients of a closed loop, mean prompt and output tokens, requests for each client. Together they cover decoding from
# one sequence to sixty-four, short contexts and long ones, and prefill in chunks of every size beside it.
ROUNDS = (
    (1, 64, 48, 2),
    (1, 700, 32, 2),
    (2, 200, 32, 3),
    (4, 128, 40, 3),
    (8, 400, 32, 2),
    (16, 128, 40, 2),
    (32, 64, 32, 2),
    (32, 300, 24, 2),
    (64, 24, 24, 2),
)
SPREAD = 0.6  # lengths are drawn evenly within this share of the mean, up and down
STALL = 3.0  # a step that takes this many times what the fit says was held up by something else on the machine
REFITS = 3
WARM_UP = (2, 64, 8, 1)


class StepTimer:
    """An executor that passes every step on to another and notes what it computes and when it begins."""

    def __init__(self, executor: Executor, now: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._now = now
        self.steps: list[tuple[StepWork, float]] = []  # and when each began

    def capacity(self) -> Capacity:
        """The inner executor's."""
        return self._executor.capacity()

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the step inside, and notes it."""
        began = self._now()
        result = self._executor.execute(plan)
        self.steps.append((step_work(plan), began))
        return result

    def close(self) -> None:
        """Leaves the inner executor open: it is not this one's."""

    def take(self) -> list[tuple[StepWork, float]]:
        """The steps since the last call, each with the time to the beginning of the next.

        That is what a step costs a request: the executor, and the engine's own work around it. The last has no next
        and is left out.
        """
        steps = self.steps
        self.steps = []
        return [(work, after - began) for (work, began), (_, after) in itertools.pairwise(steps)]


def calibrate(
    executor: Executor,
    config: EngineConfig,
    *,
    rounds: Sequence[tuple[int, int, int, int]] | None = None,
    repeats: int = 2,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
    note: Callable[[str], None] = lambda _: None,
) -> MeasuredCost:
    """Runs short workloads of many shapes on an engine and fits a cost model to their steps.

    Args:
        executor: with the model loaded; left open.
        config: what it was made with.
        rounds: instead of :data:`ROUNDS`.
        repeats: how often all rounds are run.
        seed: of lengths and prompts.
        now: tells the time; another one than the wall's can leave out what other programs do meanwhile.
        note: told what is running.

    Raises:
        CalibrationError: the model's length leaves too few shapes to run.
    """
    rounds = ROUNDS if rounds is None else rounds
    capacity = executor.capacity()
    timer = StepTimer(executor, now)
    rng = np.random.default_rng(seed)
    _run_round(WARM_UP, config, timer, rng)
    timer.take()
    steps: list[tuple[StepWork, float]] = []
    for repeat in range(repeats):
        for number, shape in enumerate(rounds, 1):
            note(f"calibration {repeat + 1} of {repeats}, round {number} of {len(rounds)}: {shape[0]} at a time")
            _run_round(shape, config, timer, rng)
            steps += timer.take()
    return _fit_without_stalls(
        steps,
        model=capacity.model,
        dtype=capacity.dtype,
        device=capacity.device,
        capacity={
            name: getattr(capacity, name)
            for name in ("num_blocks", "block_size", "max_num_batched_tokens", "max_model_len")
        },
        source=f"calibration of {len(rounds)} rounds, {repeats} times, of the engine's own loop",
    )


def _run_round(
    shape: tuple[int, int, int, int], config: EngineConfig, timer: StepTimer, rng: np.random.Generator
) -> None:
    clients, prompt, output, each = shape
    capacity = timer.capacity()
    clients = min(clients, config.max_num_seqs)
    longest = capacity.max_model_len
    lengths = []
    for _ in range(clients * each):
        drawn = min(max(1, round(prompt * rng.uniform(1 - SPREAD, 1 + SPREAD))), longest // 2)
        lengths.append((drawn, max(2, min(round(output * rng.uniform(1 - SPREAD, 1 + SPREAD)), longest // 2))))
    requests = make_requests(lengths, capacity.vocab_size, rng)
    workload = Workload("calibration", "", requests, clients)
    run_workload(workload, build_scheduler(config, capacity), timer, WallClock(), eos_token_ids=capacity.eos_token_ids)


def fit_step_log(path: Path, block_size: int) -> MeasuredCost:
    """Fits a cost model to the step log of a server (``chairlift serve --step-log``).

    As in a calibration, a step's time is taken to the beginning of the next where the engine went straight on to it,
    so the engine's own work is in it; else the time inside the executor stands for it.

    Raises:
        CalibrationError: the file cannot be read, a line of it is wrong (which one), or it has too few steps.
    """
    logged = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    logged.append(_logged_step(json.loads(line)))
                except (ValueError, TypeError, KeyError) as error:
                    cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                    raise CalibrationError(f"{path}, line {number} is no step record: {cause}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read the step log {path}: {error}") from error
    return _fit_without_stalls(
        [
            (step.work, max(step.elapsed, after.began - step.began) if step.went_on_to(after) else step.elapsed)
            for step, after in itertools.zip_longest(logged, logged[1:])
            if step.work.rows
        ],
        model="",
        dtype="",
        device="",
        capacity={"block_size": block_size},
        source=f"step log {path.name}",
    )


@dataclass(frozen=True, slots=True)
class _LoggedStep:
    number: int
    began: float
    elapsed: float
    running: int  # after it: then the engine has no reason to wait
    work: StepWork

    def went_on_to(self, after: _LoggedStep | None) -> bool:
        return after is not None and after.number == self.number + 1 and self.running > 0


def _logged_step(record: dict[str, Any]) -> _LoggedStep:
    rows = sum(int(record["rows"][kind]) for kind in ("prefill", "decode", "recomputed", "padding", "ended"))
    elapsed = float(record["elapsed"])
    if not elapsed > 0:
        raise ValueError(f"elapsed is {elapsed:g}")
    sequences, sampled, context, pairs = (int(record[name]) for name in ("sequences", "sampled", "context", "pairs"))
    swapped = int(record["blocks_swapped_out"]) + int(record["blocks_swapped_in"])
    work = StepWork(rows, sequences, sampled, context, pairs, swapped)
    return _LoggedStep(int(record["step"]), float(record["time"]), elapsed, int(record["running"]), work)


def _fit_without_stalls(steps: Sequence[tuple[StepWork, float]], **about: Any) -> MeasuredCost:
    """Fits, leaves out steps that took several times what the fit says, and fits again."""
    cost = fit_cost(steps, **about)
    for _ in range(REFITS):
        kept = [(work, seconds) for work, seconds in steps if seconds <= STALL * cost.seconds(work)]
        if len(kept) == cost.steps:
            break
        cost = fit_cost(kept, **about)
    return cost
