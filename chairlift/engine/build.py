"""Puts an engine together from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.config import EngineConfig
from chairlift.engine.clock import WallClock
from chairlift.engine.core import Command, EngineCore
from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.kv.manager import KVManager


def build_core(config: EngineConfig, drain: Callable[[], Sequence[Command]]) -> EngineCore:
    """Loads the model and returns an engine that is ready for its first step.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        ModelError: the model cannot be had, or is not one of those supported.
    """
    # Here and not above: whoever only talks to an engine should not have to load torch.
    from chairlift.execution.local import LocalExecutor

    executor = LocalExecutor(config)
    capacity = executor.capacity()
    scheduler = ContinuousScheduler(
        SchedulerConfig(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=capacity.max_num_batched_tokens),
        KVManager(capacity.num_blocks, capacity.block_size),
        capacity.max_model_len,
    )
    return EngineCore(scheduler, executor, WallClock(), drain, capacity.eos_token_ids)
