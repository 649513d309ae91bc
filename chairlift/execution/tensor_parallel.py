"""An executor of several ranks on this machine, each of which holds a part of every layer.

Rank 0 lives in the engine's process: it plans, sends each plan to the others, and alone samples. Ranks compute the same
step at the same time and meet twice a layer, so none needs to tell another when it is done.
"""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from chairlift.config import ConfigError, EngineConfig, available_cores
from chairlift.engine.executor import Capacity
from chairlift.execution.collective import CommunicationError, DistributedRanks
from chairlift.execution.memory import available_host_memory
from chairlift.execution.other_ranks import OtherRanks, RankError
from chairlift.execution.rank import Assignment, Join, Limit, Room
from chairlift.execution.runner import StepOutcome
from chairlift.execution.setup import Setup
from chairlift.execution.start import start
from chairlift.execution.worker import Holding, Worker, num_blocks_of_all, num_host_blocks_of_all
from chairlift.model.parallel import Span, check_size
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan, StepResult
from chairlift.scheduling.sampling_params import SamplingParams

START_SECONDS = 300.0
"""How long ranks wait for one another while kernels compile and memory is measured."""
PATIENCE = 0.75
"""How long they do later, as a share of ``step_timeout``: before a supervisor ends an engine of which it knows no more
than that no step ends, the engine itself is to find the rank that hangs."""
SOME = SamplingParams(temperature=0, seed=0)


class TensorParallelExecutor:
    """Shares a model among ranks and runs its steps. See :class:`chairlift.engine.executor.Executor`.

    There can be one in a process at a time.

    Args:
        config: whose ``tensor_parallel_size`` is the number of ranks.
        on_failure: called by a thread when a rank has ended, so that this is known before the next step.

    Attributes:
        holdings: what each rank holds, in their order.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        ModelError: the model cannot be had, or is not one of those supported.
        RankError: a rank ended otherwise.
    """

    def __init__(self, config: EngineConfig, on_failure: Callable[[RankError], None] | None = None) -> None:
        setup = Setup.of(config)
        size = config.tensor_parallel_size
        check_size(setup.model_config, size)
        threads = _threads(setup, size)
        devices = [torch.device("cuda", rank) if setup.device.type == "cuda" else setup.device for rank in range(size)]
        self._out_of_step = ""
        self._ranks = DistributedRanks(0, size, devices[0])
        self._patience = PATIENCE * config.step_timeout
        self._others = OtherRanks(size, self._patience, on_failure)
        try:
            self._others.assign(
                [Assignment(setup, rank, size, devices[rank], threads[rank]) for rank in range(1, size)]
            )
            self._worker: Worker | None = Worker(setup, self._ranks, devices[0], threads[0])
            self.holdings = [self._worker.holding, *self._others.answers(Holding)]
            self._capacity = self._start(setup, self._worker)
        except BaseException:
            self._others.close(at_once=True)
            self._ranks.leave()
            raise

    def _start(self, setup: Setup, worker: Worker) -> Capacity:
        # As it was before the weights were loaded, and after all else that a process takes to run was.
        available = available_host_memory()
        if setup.device.type == "cpu":
            available += Holding.total(self.holdings).weights
        with tempfile.TemporaryDirectory(prefix="chairlift-ranks-") as directory, self._blaming():
            join = Join(Path(directory) / "store", START_SECONDS)
            self._others.send(join)
            self._ranks.join(join.store, join.seconds)
            if setup.measures_memory:
                rooms = [worker.num_blocks_here(), *(room.num_blocks for room in self._others.answers(Room))]
                num_blocks = min(rooms)
            else:
                num_blocks = num_blocks_of_all(setup, self.holdings, available)
            num_host_blocks = num_host_blocks_of_all(setup, self.holdings, num_blocks, available)
            self._others.send(Room(num_blocks, num_host_blocks))
            worker.allocate(num_blocks, num_host_blocks)
            capacity = start(
                self._run,
                setup,
                Holding.total(self.holdings),
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                device=f"{len(self.holdings)} × {setup.device.type}",
                attention=worker.attention.name,
            )
            self._others.send(Limit(self._patience))
            self._ranks.limit(self._patience)
        return capacity

    def capacity(self) -> Capacity:
        """Returns what fits; constant."""
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step and returns the sampled tokens in plan order; see :class:`LocalExecutor`.

        Raises:
            RankError: a rank has ended or hangs; nothing can be computed any more.
        """
        started = time.perf_counter()
        done = self._run(plan)
        elapsed = time.perf_counter() - started
        return StepResult(done.token_ids, elapsed, done.failed, done.logprobs, done.prompt_logprobs)

    def close(self) -> None:
        """Ends the other ranks and frees the weights and the KV cache. Safe to call twice."""
        self._worker = None
        self._others.close()
        self._ranks.leave()

    def _run(self, plan: StepPlan) -> StepOutcome:
        if self._worker is None:
            raise RuntimeError("the executor is closed")
        if self._out_of_step:
            raise RankError(f"the ranks are out of step: {self._out_of_step}")
        runner = self._worker.runner
        try:
            with self._blaming():
                self._others.send(_to_follow(plan, runner.block_size))
                return runner.run(plan)
        except BaseException as error:
            self._out_of_step = f"an earlier step ended in its middle ({type(error).__name__}: {error})"
            raise

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Names the rank because of which something did not come about."""
        try:
            yield
        except CommunicationError as error:
            raise self._others.failure(str(error)) from None  # what torch says of it leads astray


def _threads(setup: Setup, size: int) -> list[int]:
    """Compute threads of each rank.

    Raises:
        ConfigError: there are fewer cores, or GPUs, than ranks.
    """
    if setup.device.type == "cuda" and (devices := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} needs as many GPUs, and torch sees {devices} here; use {devices} or less"
        )
    threads = setup.config.num_threads or available_cores()
    if setup.device.type == "cpu" and threads < size:
        given = "threads of --num-threads" if setup.config.num_threads else "cores that this process may use"
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the {threads} {given}, and ranks that share a core wait for "
            f"one another in every layer; use {threads} or less"
        )
    return [max(1, len(Span.even(threads, rank, size))) for rank in range(size)]


def _to_follow(plan: StepPlan, block_size: int) -> StepPlan:
    """What the other ranks need of a plan, in a form that is quick to send: they sample nothing."""

    def chunk_to_follow(chunk: SequenceChunk) -> SequenceChunk:
        num_blocks = -(-(chunk.start + len(chunk.token_ids)) // block_size)
        return replace(
            chunk,
            block_table=array("i", chunk.block_table[:num_blocks]),
            sampling=None if chunk.sampling is None else SOME,
            context=None,
            allowed=None,
        )

    chunks = [chunk_to_follow(chunk) for chunk in plan.chunks]
    return StepPlan(plan.step, chunks, RowCounts(), plan.swap_out, plan.swap_in)
