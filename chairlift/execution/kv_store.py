"""The memory that keys and values live in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.model.attention.base import KVLayout, LayerKVs, kv_width
from chairlift.model.config import ModelConfig
from chairlift.model.kernels.memory import aligned


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return config.num_layers * config.num_kv_heads * kv_width(1, config.head_dim, dtype) * dtype.itemsize


class KVStore:
    """Keys and values of every layer, in blocks. Which sequence owns a block is the scheduler's business.

    Args:
        layout: how the attention backend wants them.

    Attributes:
        layers: one :class:`LayerKV` for each layer of the model.
        num_blocks: blocks in each.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        width = kv_width(block_size, config.head_dim, dtype)
        numbers = _zeros((config.num_layers, num_blocks, config.num_kv_heads, width), dtype, device)
        self.layers = LayerKVs(layout, numbers, block_size)

    def copy_from(self, source: KVStore, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of every layer from ``source``, which may be on another device.

        Args:
            source: of the same model and block size.
            pairs: (block of ``source``, block here).
        """
        here, there = self.layers.numbers, source.layers.numbers
        if self.layers.layout != source.layers.layout:
            raise ValueError("what one backend wrote is not for another")
        taken = torch.tensor([pair[0] for pair in pairs], device=there.device)
        given = torch.tensor([pair[1] for pair in pairs], device=here.device)
        for to, what in zip(here, there, strict=True):
            to[given] = what[taken].to(here.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write all pages, which the system gives zeroed, once they are touched.
    return torch.from_numpy(aligned(math.prod(shape) * dtype.itemsize, np.uint8, zeros=True)).view(dtype).view(shape)
