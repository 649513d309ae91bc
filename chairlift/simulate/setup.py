"""From a deployment to what a simulation needs: capacity, settings, cost."""

from __future__ import annotations

from chairlift.config import EngineConfig
from chairlift.engine.executor import Capacity
from chairlift.scheduling.work import StepWork
from chairlift.simulate.cost import StepCost
from chairlift.simulate.sizes import Deployment, SizingError

RECOMPUTED_TOKENS = 512  # over which the cost of recomputing one is averaged


def capacity(deployment: Deployment, cost: StepCost, name: str = "") -> Capacity:
    """What a deployment holds, as its engine would report it.

    Raises:
        SizingError: the weights do not fit, or not one sequence of full length would.
    """
    check_fits(deployment)
    work = StepWork(rows=RECOMPUTED_TOKENS, sequences=1, pairs=RECOMPUTED_TOKENS**2 // 2)
    idle = cost.seconds(StepWork())
    return Capacity(
        num_blocks=deployment.num_blocks,
        block_size=deployment.block_size,
        max_model_len=deployment.max_model_len,
        vocab_size=deployment.model.vocab_size,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        num_host_blocks=deployment.num_host_blocks,
        model=name,
        architecture=deployment.model.architecture,
        dtype=deployment.precision.name,
        device=f"{deployment.tensor_parallel_size} × {deployment.hardware.title}, simulated",
        attention_backend="simulated",
        weight_bytes=deployment.weight_bytes * deployment.tensor_parallel_size,
        kv_bytes_per_token=deployment.kv_bytes_per_token * deployment.tensor_parallel_size,
        recompute_seconds_per_token=(cost.seconds(work) - idle) / RECOMPUTED_TOKENS,
        swap_seconds_per_block=cost.seconds(StepWork(swapped_blocks=1)) - idle,
    )


def check_fits(deployment: Deployment) -> None:
    """Raises SizingError, with the arithmetic, unless weights and one sequence of full length fit."""
    if not deployment.weights_fit:
        raise SizingError(weights_do_not_fit(deployment))
    if deployment.kv_tokens < deployment.max_model_len:
        raise SizingError(
            f"the weights fit, but the {max(0, deployment.kv_budget) / 1e9:.2f} GB left for the KV cache hold "
            f"{deployment.kv_tokens:,} tokens, fewer than one sequence of --max-model-len {deployment.max_model_len}; "
            f"{_lower_length(deployment)}raise --gpu-memory-utilization, use more devices (--tensor-parallel-size) "
            "or a smaller --dtype"
        )


def weights_do_not_fit(deployment: Deployment) -> str:
    """Says by how much, and what would fit."""
    needed = deployment.weight_bytes + deployment.context_bytes + deployment.activation_bytes
    return (
        f"the weights do not fit: on each of {deployment.tensor_parallel_size} × {deployment.hardware.title} "
        f"{deployment.weight_bytes / 1e9:.2f} GB of weights, {deployment.context_bytes / 1e9:.2f} GB for libraries and "
        f"{deployment.activation_bytes / 1e9:.2f} GB of activations make {needed / 1e9:.2f} GB, but "
        f"{deployment.gpu_memory_utilization:.0%} of its memory is {deployment.usable_bytes / 1e9:.2f} GB; use more "
        "devices (--tensor-parallel-size), a smaller --dtype, or larger hardware"
    )


def engine_config(
    deployment: Deployment,
    *,
    prefix_caching: bool = False,
    static_batch_size: int | None = None,
    static_batch_timeout: float = 0.1,
    preemption_mode: str = "auto",
) -> EngineConfig:
    """The settings of the engine's own scheduler. One simulated executor stands for all devices of a replica."""
    return EngineConfig(
        model="simulated",
        max_model_len=deployment.max_model_len,
        block_size=deployment.block_size,
        swap_space=deployment.swap_space,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        batching="continuous" if static_batch_size is None else "static",
        static_batch_size=static_batch_size or 1,
        static_batch_timeout=static_batch_timeout,
        enable_prefix_caching=prefix_caching,
        preemption_mode=preemption_mode,
    )


def _lower_length(deployment: Deployment) -> str:
    return f"lower --max-model-len to {deployment.kv_tokens} or less, " if deployment.kv_tokens > 1 else ""
