"""Which attention backend serves a model on a device."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.config import ConfigError
from chairlift.model.attention.base import AttentionBackend
from chairlift.model.attention.reference import ReferenceAttention


def select_backend(
    name: str,
    device: torch.device,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> AttentionBackend[Any]:
    """Makes the attention backend of that name; "auto" takes the fastest that serves this model on this device.

    Raises:
        ConfigError: there is no such backend, or it cannot serve this model here. The message says what can.
    """
    sizes: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "dtype": dtype,
    }
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return ReferenceAttention(**sizes)
    if name not in ("auto", "cpu"):
        raise ConfigError(f"--attention-backend must be auto, reference or cpu; got {name!r}")
    if device.type != "cpu":
        raise ConfigError(f"--attention-backend cpu runs on the CPU, not on {device}; use auto or reference")

    # Numba takes a while to import, and nothing else needs it.
    from chairlift.model.attention.cpu import CpuAttention, unsupported

    reason = unsupported(dtype, head_dim)
    if reason is None:
        return CpuAttention(**sizes)
    if name == "auto":
        return ReferenceAttention(**sizes)
    raise ConfigError(f"{reason}; use --attention-backend reference")
