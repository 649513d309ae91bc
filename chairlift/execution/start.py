"""An executor's first steps: kernels are compiled, speeds measured, and what fits is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chairlift.engine.executor import Capacity
from chairlift.execution.runner import StepOutcome
from chairlift.execution.sampler import NonFiniteLogitsError
from chairlift.execution.setup import Setup, StepLimits
from chairlift.execution.worker import Holding
from chairlift.scheduling.plan import RowCounts, StepPlan

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
SPEED_TEST_TOKENS, SPEED_TEST_BLOCKS = 256, 16

Run = Callable[[StepPlan], StepOutcome]


def start(
    run: Run, setup: Setup, total: Holding, *, num_blocks: int, num_host_blocks: int, device: str, attention: str
) -> Capacity:
    """Runs the first steps of an executor.

    Args:
        run: runs a step.
        setup: what it was made from.
        total: what it holds, on all ranks.
        num_blocks, num_host_blocks: KV blocks on the device and on the host.
        device: what it runs on, in words.
        attention: name of the attention backend.

    Raises:
        NonFiniteLogitsError: the model computes nonsense.
    """
    _first_step(run, setup)
    recompute, swap = _measure_speeds(run, setup.limits, num_blocks, num_host_blocks) if num_host_blocks else (0.0, 0.0)
    return Capacity(
        num_blocks=num_blocks,
        block_size=setup.limits.block_size,
        max_model_len=setup.limits.max_model_len,
        vocab_size=setup.model_config.vocab_size,
        max_num_batched_tokens=setup.limits.max_num_batched_tokens,
        eos_token_ids=setup.model_config.eos_token_ids,
        num_host_blocks=num_host_blocks,
        recompute_seconds_per_token=recompute,
        swap_seconds_per_block=swap,
        model=setup.source.name,
        architecture=setup.model_config.architecture,
        dtype=str(setup.dtype).removeprefix("torch."),
        device=device,
        attention_backend=attention,
        weight_bytes=total.weights,
        kv_bytes_per_token=total.kv_per_token,
    )


def _first_step(run: Run, setup: Setup) -> None:
    """Kernels compile when they first run: that is now, and not in somebody's first token."""
    small = StepLimits(8, 2, min(8, setup.limits.max_model_len), setup.limits.block_size)
    with _progress("compiling kernels for this processor, which later starts of this version need not"):
        outcome = run(small.largest_step())
    if outcome.failed:
        raise NonFiniteLogitsError(range(len(outcome.failed)), f"the first step of {setup.source.name}")


@contextmanager
def _progress(doing: str) -> Iterator[None]:
    """Says every few seconds that something goes on, and at the end how long it took; nothing if it is soon done."""
    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_SECONDS):
            logger.info("%s: %.0f s so far", doing, time.monotonic() - started)

    teller = threading.Thread(target=tell, name="chairlift-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        if (took := time.monotonic() - started) > PROGRESS_SECONDS:
            logger.info("%s: done in %.0f s", doing, took)


def _measure_speeds(run: Run, limits: StepLimits, num_blocks: int, num_host_blocks: int) -> tuple[float, float]:
    """Seconds to compute a prompt token again, and to move a block one way: what a preemption weighs up."""
    rows = min(SPEED_TEST_TOKENS, limits.max_num_batched_tokens, limits.max_model_len)
    prefill = StepLimits(rows, 1, rows, limits.block_size).largest_step()
    count = min(SPEED_TEST_BLOCKS, num_host_blocks, num_blocks)
    move = StepPlan(0, (), RowCounts(), swap_out=[(block, block) for block in range(count)])
    return _best_time(run, prefill) / rows, _best_time(run, move) / count


def _best_time(run: Run, plan: StepPlan) -> float:
    times = []
    for _ in range(3):  # the first touches memory that later ones find in place
        started = time.perf_counter()
        run(plan)
        times.append(time.perf_counter() - started)
    return min(times)
