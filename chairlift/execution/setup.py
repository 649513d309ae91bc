"""What an engine's settings come to for a model and a device: the same for every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from chairlift.config import ConfigError, EngineConfig
from chairlift.execution.memory import resolve_max_model_len
from chairlift.model.config import ModelConfig, read_config
from chairlift.model.source import ModelSource, resolve
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

# Rows in a step where nobody asks. More rows feed the device better and make everyone else wait longer; on the CPU a
# chunk of this many rows already runs at the full speed of its matrix products.
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
CPU_INFO = Path("/proc/cpuinfo")
# What a processor calls its bfloat16 instructions: x86 with AVX-512 or AMX, Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


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


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine's settings, with all that was left open in them found.

    Attributes:
        config: the settings.
        source: the model's files.
        model_config: of the whole model.
        device: of rank 0.
        dtype: of weights and activations.
        limits: of a step.
    """

    config: EngineConfig
    source: ModelSource
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    limits: StepLimits

    @classmethod
    def of(cls, config: EngineConfig) -> Setup:
        """Finds the model and the device.

        Raises:
            ConfigError: the settings do not fit the model or the device.
            ModelError: the model cannot be had, or is not one of those supported.
        """
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        source = resolve(config.model, config.revision)
        model_config = read_config(source)
        max_model_len = resolve_max_model_len(config.max_model_len, model_config)
        default = DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
        budget = config.max_num_batched_tokens or max(default, config.max_num_seqs)
        limits = StepLimits(budget, config.max_num_seqs, max_model_len, config.block_size)
        return cls(config, source, model_config, device, dtype, limits)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return torch.int8 if self.config.kv_cache_dtype == "int8" else self.dtype

    @property
    def measures_memory(self) -> bool:
        """Whether the room for the KV cache is found by running the largest step on each device."""
        return self.config.kv_cache_memory_bytes is None and self.device.type == "cuda"


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
