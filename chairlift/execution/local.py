"""An executor on one device of this machine."""

from __future__ import annotations

import time

import torch

from chairlift.config import EngineConfig, available_cores
from chairlift.cores import bind, unbind
from chairlift.engine.executor import Capacity
from chairlift.execution.kv_store import KVStore
from chairlift.execution.memory import available_host_memory
from chairlift.execution.runner import ModelRunner
from chairlift.execution.setup import Setup
from chairlift.execution.start import start
from chairlift.execution.worker import Worker, num_blocks_of_all, num_host_blocks_of_all
from chairlift.model.base import Decoder
from chairlift.model.parallel import OneRank
from chairlift.scheduling.plan import StepPlan, StepResult


class LocalExecutor:
    """Loads a model onto one device and runs its steps. See :class:`chairlift.engine.executor.Executor`.

    Raises:
        ConfigError: the settings do not fit the model or the device.
        ModelError: the model cannot be had, or is not one of those supported.
    """

    def __init__(self, config: EngineConfig) -> None:
        setup = Setup.of(config)
        available = available_host_memory()
        num_threads = config.num_threads or len(config.bound_cores) or available_cores()
        worker = Worker(setup, OneRank(), setup.device, num_threads)
        self._threads = worker.threads_to_bind() if config.cpu_threads_bind else None
        holdings = [worker.holding]
        if setup.measures_memory:
            num_blocks = worker.num_blocks_here()
        else:
            num_blocks = num_blocks_of_all(setup, holdings, available)
        num_host_blocks = num_host_blocks_of_all(setup, holdings, num_blocks, available)
        worker.allocate(num_blocks, num_host_blocks)
        self._runner: ModelRunner | None = worker.runner
        self._capacity = start(
            worker.runner.run,
            setup,
            worker.holding,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            device=str(setup.device),
            attention=worker.attention.name,
        )
        # Last, since threads that others start from this one, such as torch's, begin bound as it is.
        if self._threads is not None:
            bind(self._threads, config.bound_cores)

    def capacity(self) -> Capacity:
        """Returns what fits; constant."""
        return self._capacity

    @property
    def model(self) -> Decoder:
        """The model that it runs."""
        return self._open_runner().model

    @property
    def kv(self) -> KVStore:
        """The memory of its keys and values."""
        return self._open_runner().kv

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        return self._runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step and returns the sampled tokens in plan order.

        A request for which the model computes nonsense is reported as failed, and costs the others nothing.
        """
        runner, started = self._open_runner(), time.perf_counter()
        # Sampled tokens come back as numbers, so the device has finished when they are here.
        done = runner.run(plan)
        elapsed = time.perf_counter() - started
        return StepResult(done.token_ids, elapsed, done.failed, done.logprobs, done.prompt_logprobs)

    def close(self) -> None:
        """Frees the weights and the KV cache, and the calling thread if it was bound. Safe to call twice."""
        self._runner = None
        if self._threads is not None:
            self._threads = None
            unbind()
        if self._capacity.device != "cpu":
            torch.cuda.empty_cache()
