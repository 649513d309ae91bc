"""An executor on one device of this machine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.config import GIB, ConfigError, EngineConfig, available_cores
from chairlift.engine.executor import Capacity
from chairlift.execution.kv_store import KVStore, kv_bytes_per_token
from chairlift.execution.memory import (
    DEFAULT_SHARE,
    KVBudget,
    activation_bytes,
    available_host_memory,
    explicit_budget,
    num_kv_blocks,
    num_swap_blocks,
    resolve_max_model_len,
    shared_budget,
)
from chairlift.execution.runner import ModelRunner
from chairlift.execution.sampler import NonFiniteLogitsError
from chairlift.model.attention.base import AttentionBackend
from chairlift.model.attention.select import select_backend
from chairlift.model.base import Decoder
from chairlift.model.config import read_config
from chairlift.model.registry import fit_to_cpu, load_model
from chairlift.model.source import resolve
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan, StepResult
from chairlift.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
# Rows in a step where nobody asks. More rows feed the device better and make everyone else wait longer; on the CPU a
# chunk of this many rows already runs at the full speed of its matrix products.
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
SPEED_TEST_TOKENS, SPEED_TEST_BLOCKS = 256, 16
CPU_INFO = Path("/proc/cpuinfo")
# What a processor calls its bfloat16 instructions: x86 with AVX-512 or AMX, Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class LocalExecutor:
    """Loads a model onto one device and runs its steps. See :class:`chairlift.engine.executor.Executor`.

    Attributes:
        default_max_num_batched_tokens: the device's token budget, where the settings name none.

    Raises:
        ConfigError: the settings do not fit the model or the device.
        ModelError: the model cannot be had, or is not one of those supported.
    """

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.num_threads or available_cores())
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        source = resolve(config.model, config.revision)
        model_config = read_config(source)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        self.default_max_num_batched_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
        budget = config.max_num_batched_tokens or max(self.default_max_num_batched_tokens, config.max_num_seqs)
        limits = StepLimits(budget, config.max_num_seqs, max_model_len, config.block_size)
        attention = select_backend(
            config.attention_backend,
            device,
            num_heads=model_config.num_heads,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=dtype,
        )

        available = available_host_memory()
        loaded = load_model(source, model_config, dtype=dtype, device=device)
        model = fit_to_cpu(loaded, attention, config.quantization)
        bytes_per_token = kv_bytes_per_token(model_config, dtype)
        num_blocks = num_kv_blocks(
            _kv_budget(config, limits, model, attention, available),
            bytes_per_token=bytes_per_token,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        block_bytes = config.block_size * bytes_per_token
        on_host = model.weight_bytes + num_blocks * block_bytes if device.type == "cpu" else 0
        num_host_blocks = num_swap_blocks(
            int(config.swap_space * GIB),
            available=available - on_host,
            block_bytes=block_bytes,
            most=config.max_num_seqs * -(-max_model_len // config.block_size),
        )
        self._runner: ModelRunner | None = _runner(model, attention, num_blocks, config.block_size, num_host_blocks)
        _first_step(self._runner, limits, source.name)
        recompute, swap = _measure_speeds(self._runner, limits) if num_host_blocks else (0.0, 0.0)
        self._capacity = Capacity(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            max_num_batched_tokens=budget,
            eos_token_ids=model_config.eos_token_ids,
            num_host_blocks=num_host_blocks,
            recompute_seconds_per_token=recompute,
            swap_seconds_per_block=swap,
            model=source.name,
            architecture=model_config.architecture,
            dtype=_name(dtype),
            device=str(device),
            attention_backend=attention.name,
            weight_bytes=model.weight_bytes,
            kv_bytes_per_token=bytes_per_token,
        )

    def capacity(self) -> Capacity:
        """Returns what fits; constant."""
        return self._capacity

    @property
    def model(self) -> Decoder:
        """The model that it runs."""
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        return self._runner.model

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step and returns the sampled tokens in plan order.

        A request for which the model computes nonsense is reported as failed, and costs the others nothing.
        """
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        started = time.perf_counter()
        # Sampled tokens come back as numbers, so the device has finished when they are here.
        done = self._runner.run(plan)
        elapsed = time.perf_counter() - started
        return StepResult(done.token_ids, elapsed, done.failed, done.logprobs, done.prompt_logprobs)

    def close(self) -> None:
        """Frees the weights and the KV cache. Safe to call twice."""
        self._runner = None
        if self._capacity.device != "cpu":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step may be."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int

    def largest_step(self) -> StepPlan:
        """A plan that needs as much memory as any: as many rows, sequences and sampled tokens, and a full context.

        Every block table is block 0 over and over. What is computed means nothing, and how it is computed is the same.
        """
        others = min(self.max_num_seqs, self.max_num_batched_tokens) - 1
        rows = min(self.max_num_batched_tokens - others, self.max_model_len)
        table = [0] * -(-self.max_model_len // self.block_size)
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        chunks = [
            SequenceChunk(str(i), [0] * n, self.max_model_len - n, table, params)
            for i, n in enumerate([rows] + [1] * others)
        ]
        return StepPlan(0, chunks, RowCounts(prefill=rows, decode=others))


def _first_step(runner: ModelRunner, limits: StepLimits, name: str) -> None:
    """Kernels compile when they first run: that is now, and not in somebody's first token.

    Raises:
        NonFiniteLogitsError: the model computes nonsense.
    """
    small = StepLimits(8, 2, min(8, limits.max_model_len), limits.block_size)
    with _progress("compiling kernels for this processor, which later starts of this version need not"):
        outcome = runner.run(small.largest_step())
    if outcome.failed:
        raise NonFiniteLogitsError(range(len(outcome.failed)), f"the first step of {name}")


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


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" takes CUDA where there is one.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """The precision of that name; "auto" takes bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    try:
        flags = set(cpu_info.read_text().split())
    except OSError:
        flags = set()
    return torch.bfloat16 if flags & BFLOAT16_FLAGS else torch.float32


def _runner(
    model: Decoder, attention: AttentionBackend[Any], num_blocks: int, block_size: int, num_host_blocks: int = 0
) -> ModelRunner:
    weight = model.embedding

    def store(blocks: int, device: torch.device) -> KVStore:
        return KVStore(model.config, num_blocks=blocks, block_size=block_size, dtype=weight.dtype, device=device)

    return ModelRunner(
        model,
        attention,
        store(num_blocks, weight.device),
        block_size=block_size,
        device=weight.device,
        host=store(num_host_blocks, torch.device("cpu")) if num_host_blocks else None,
    )


def _measure_speeds(runner: ModelRunner, limits: StepLimits) -> tuple[float, float]:
    """Seconds to compute a prompt token again, and to move a block one way: what a preemption weighs up."""
    assert runner.host is not None  # noqa: S101 - called only with swap space
    rows = min(SPEED_TEST_TOKENS, limits.max_num_batched_tokens, limits.max_model_len)
    prefill = StepLimits(rows, 1, rows, limits.block_size).largest_step()
    count = min(SPEED_TEST_BLOCKS, runner.host.num_blocks, runner.kv.num_blocks)
    move = StepPlan(0, (), RowCounts(), swap_out=[(block, block) for block in range(count)])
    return _best_time(runner, prefill) / rows, _best_time(runner, move) / count


def _best_time(runner: ModelRunner, plan: StepPlan) -> float:
    times = []
    for _ in range(3):  # the first touches memory that later ones find in place
        started = time.perf_counter()
        runner.run(plan)
        times.append(time.perf_counter() - started)
    return min(times)


def _kv_budget(
    config: EngineConfig, limits: StepLimits, model: Decoder, attention: AttentionBackend[Any], available: int
) -> KVBudget:
    """What the settings, or the share of memory that they name, leave for the KV cache.

    ``available`` is what the host had before the weights were loaded.
    """
    if config.kv_cache_memory_bytes is not None:
        return explicit_budget(config.kv_cache_memory_bytes)
    device = model.embedding.device
    share = config.gpu_memory_utilization or DEFAULT_SHARE[device.type]
    if device.type == "cuda":
        return _measured_budget(_runner(model, attention, 1, config.block_size), limits, share)
    reserve = activation_bytes(
        model.config,
        num_tokens=limits.max_num_batched_tokens,
        num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        itemsize=model.embedding.dtype.itemsize,
    )
    return shared_budget(total=available, share=share, in_use=model.weight_bytes, reserve=reserve, device="the CPU")


def _measured_budget(runner: ModelRunner, limits: StepLimits, share: float) -> KVBudget:
    """Runs the largest step on a CUDA device and reserves what it took."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.run(limits.largest_step())
    reserve = torch.cuda.max_memory_allocated(runner.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    return shared_budget(
        total=total, share=share, in_use=total - free, reserve=reserve, device=torch.cuda.get_device_name(runner.device)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
