"""One rank on its device: its part of the model, its part of the KV cache, and what runs steps on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from chairlift.config import GIB, ConfigError
from chairlift.cores import Threads
from chairlift.execution.kv_store import KVStore, kv_bytes_per_token
from chairlift.execution.memory import (
    DEFAULT_SHARE,
    activation_bytes,
    explicit_budget,
    num_kv_blocks,
    num_swap_blocks,
    shared_budget,
)
from chairlift.execution.runner import ModelRunner
from chairlift.execution.setup import Setup
from chairlift.model.attention.select import select_backend
from chairlift.model.parallel import Communicator, Partition
from chairlift.model.registry import fit_to_cpu, load_model, numba_starting


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that a rank holds, or all ranks together.

    Attributes:
        weights: of the weights.
        kv_per_token: of the keys and values of one token over all layers.
        reserve: that a step needs besides, as far as can be said without running one.
    """

    weights: int
    kv_per_token: int
    reserve: int

    @classmethod
    def total(cls, holdings: Iterable[Holding]) -> Holding:
        """Of all ranks together."""
        parts = [(h.weights, h.kv_per_token, h.reserve) for h in holdings]
        return cls(*(sum(column) for column in zip(*parts, strict=True)))


class Worker:
    """Loads a rank's part of the model; :meth:`allocate` then makes room for keys and values.

    Args:
        setup: what every rank has to know.
        ranks: the others; none of them is called before :meth:`num_blocks_here` and :attr:`runner` are.
        device: of this rank.
        num_threads: to compute with, where the device is the CPU.

    Raises:
        ConfigError: the settings do not fit the model or the device.
        ModelError: the model is not one of those supported, or its files are damaged.
    """

    def __init__(self, setup: Setup, ranks: Communicator, device: torch.device, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        own = Partition.of(setup.model_config, ranks.rank, ranks.size).config
        self.setup = setup
        self.device = device
        self.attention = select_backend(
            setup.config.attention_backend,
            device,
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            block_size=setup.limits.block_size,
            dtype=setup.dtype,
        )
        with numba_starting(self.attention):
            loaded = load_model(setup.source, setup.model_config, dtype=setup.dtype, device=device, ranks=ranks)
        self.model = fit_to_cpu(loaded, self.attention, setup.config.quantization)
        self._runner: ModelRunner | None = None

    def threads_to_bind(self) -> Threads:
        """The threads of the CPU's kernels.

        Raises:
            ConfigError: no such kernels are used.
        """
        threads: Threads | None = getattr(self.attention, "threads", None)
        if threads is None:
            raise ConfigError(
                f"--cpu-threads-bind binds the threads of the attention backend cpu, and this is {self.attention.name} "
                f"on {self.device.type}; leave it out"
            )
        return threads

    @property
    def holding(self) -> Holding:
        """What this rank needs memory for."""
        limits = self.setup.limits
        reserve = activation_bytes(
            self.model.config,
            num_tokens=limits.max_num_batched_tokens,
            num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            itemsize=self.setup.dtype.itemsize,
        )
        return Holding(self.model.weight_bytes, kv_bytes_per_token(self.model.config, self.setup.kv_dtype), reserve)

    @property
    def runner(self) -> ModelRunner:
        """Runs steps, once there is room for them."""
        if self._runner is None:
            raise RuntimeError("the worker has no KV cache yet")
        return self._runner

    def num_blocks_here(self) -> int:
        """How many KV blocks this CUDA device has room for beside a step of the largest size, which all ranks run.

        Raises:
            ConfigError: not even one sequence fits.
        """
        config, limits = self.setup.config, self.setup.limits
        self.allocate(1, 0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.runner.run(limits.largest_step())
        reserve = torch.cuda.max_memory_allocated(self.device) - before
        self._runner = None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = shared_budget(
            total=total,
            share=config.gpu_memory_utilization or DEFAULT_SHARE["cuda"],
            in_use=total - free,
            reserve=reserve,
            device=torch.cuda.get_device_name(self.device),
        )
        return num_kv_blocks(
            budget,
            bytes_per_token=self.holding.kv_per_token,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
        )

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Makes room for so many KV blocks, and for so many on the host."""
        self._runner = ModelRunner(
            self.model,
            self.attention,
            self._store(num_blocks, self.device),
            block_size=self.setup.limits.block_size,
            device=self.device,
            host=self._store(num_host_blocks, torch.device("cpu")) if num_host_blocks else None,
        )

    def _store(self, num_blocks: int, device: torch.device) -> KVStore:
        return KVStore(
            self.model.config,
            self.attention.kv_layout(self.setup.kv_dtype),
            num_blocks=num_blocks,
            block_size=self.setup.limits.block_size,
            dtype=self.setup.kv_dtype,
            device=device,
        )


def num_blocks_of_all(setup: Setup, holdings: Sequence[Holding], available: int) -> int:
    """The KV blocks that the bytes named by the user hold, or on the CPU, whose memory all ranks share, its share.

    Args:
        setup: the settings.
        holdings: of each rank.
        available: bytes that the host had before any weights were loaded.

    Raises:
        ConfigError: not even one sequence fits.
    """
    config, limits, total = setup.config, setup.limits, Holding.total(holdings)
    if config.kv_cache_memory_bytes is not None:
        budget = explicit_budget(config.kv_cache_memory_bytes)
    else:
        budget = shared_budget(
            total=available,
            share=config.gpu_memory_utilization or DEFAULT_SHARE["cpu"],
            in_use=total.weights,
            reserve=total.reserve,
            device="the CPU",
        )
    return num_kv_blocks(
        budget,
        bytes_per_token=total.kv_per_token,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
    )


def num_host_blocks_of_all(setup: Setup, holdings: Sequence[Holding], num_blocks: int, available: int) -> int:
    """The KV blocks that ``--swap-space`` holds, over all ranks.

    Raises:
        ConfigError: the host has not so much memory beside weights and KV cache.
    """
    limits, total = setup.limits, Holding.total(holdings)
    block_bytes = limits.block_size * total.kv_per_token
    on_host = total.weights + num_blocks * block_bytes if setup.device.type == "cpu" else 0
    return num_swap_blocks(
        int(setup.config.swap_space * GIB),
        available=available - on_host,
        block_bytes=block_bytes,
        most=limits.max_num_seqs * -(-limits.max_model_len // limits.block_size),
    )
