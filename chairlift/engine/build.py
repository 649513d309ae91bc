"""Puts an engine together from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.clock import WallClock
from chairlift.engine.core import Command, EngineCore
from chairlift.engine.executor import Capacity, Executor
from chairlift.engine.records import StepLog
from chairlift.engine.structured import FormCompiler, StructuredGuide
from chairlift.model.source import resolve
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.scheduler import Scheduler
from chairlift.scheduling.static import StaticConfig, StaticScheduler

if TYPE_CHECKING:
    from chairlift.text.tokenizer import Tokenizer


def build_core(
    config: EngineConfig,
    drain: Callable[[], Sequence[Command]],
    *,
    resumes: bool = False,
    on_failure: Callable[[Exception], None] | None = None,
) -> EngineCore:
    """Loads the model and returns an engine that is ready for its first step.

    One that ``resumes`` adds to the step log of the engine whose place it takes. ``on_failure`` is called, by a thread,
    if the executor fails while it executes nothing; if it does in a step, the step raises.

    Raises:
        ConfigError: the settings do not fit the model or the machine, or the step log cannot be written.
        ModelError: the model cannot be had, or is not one of those supported.
    """
    step_log = _open_step_log(config.step_log, append=resumes)  # first: loading takes long
    executor = build_executor(config, on_failure)
    capacity = executor.capacity()
    scheduler = build_scheduler(config, capacity)
    forms = FormCompiler(lambda: _load_tokenizer(config), capacity.vocab_size, capacity.eos_token_ids)
    return EngineCore(
        scheduler,
        executor,
        WallClock(),
        drain,
        capacity.eos_token_ids,
        step_log=step_log,
        guide=StructuredGuide(forms),
    )


def build_executor(config: EngineConfig, on_failure: Callable[[Exception], None] | None = None) -> Executor:
    """Loads the model, onto so many ranks as ``config`` says; see :func:`build_core`."""
    # Here and not above: whoever only talks to an engine should not have to load torch.
    if config.tensor_parallel_size > 1:
        from chairlift.execution.tensor_parallel import TensorParallelExecutor

        return TensorParallelExecutor(config, on_failure)
    from chairlift.execution.local import LocalExecutor

    return LocalExecutor(config)


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    # Here and not above: only answers with a form need it in an engine.
    from chairlift.text.tokenizer import load_tokenizer

    return load_tokenizer(resolve(config.model, config.revision))


def _open_step_log(path: str | None, *, append: bool) -> StepLog:
    try:
        return StepLog(path, append=append)
    except OSError as error:
        raise ConfigError(f"cannot write --step-log {path}: {error.strerror}") from error


def build_scheduler(config: EngineConfig, capacity: Capacity) -> Scheduler:
    """Returns the policy that ``config`` names, for what ``capacity`` can hold."""
    if config.batching == "static":
        static = StaticConfig(
            batch_size=config.static_batch_size,
            timeout=config.static_batch_timeout,
            max_num_batched_tokens=max(capacity.max_num_batched_tokens, config.static_batch_size),
        )
        return StaticScheduler(static, KVManager(capacity.num_blocks, capacity.block_size), capacity.max_model_len)
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        victim_rule=config.preemption_victim,
        admission_reserve=config.admission_reserve,
        recompute_seconds_per_token=capacity.recompute_seconds_per_token,
        swap_seconds_per_block=capacity.swap_seconds_per_block,
    )
    kv = KVManager(
        capacity.num_blocks,
        capacity.block_size,
        num_host_blocks=capacity.num_host_blocks,
        prefix_cache=(PrefixCache(capacity.num_blocks, capacity.block_size) if config.enable_prefix_caching else None),
    )
    return ContinuousScheduler(limits, kv, capacity.max_model_len)
