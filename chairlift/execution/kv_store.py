"""The memory that keys and values live in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.model.attention.base import LayerKVs
from chairlift.model.config import ModelConfig
from chairlift.model.kernels.memory import aligned

SCALE = torch.float32
"""What an int8 cache keeps for each token and head beside its numbers."""


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    scale = SCALE.itemsize if dtype == torch.int8 else 0
    return config.num_layers * 2 * config.num_kv_heads * (config.head_dim * dtype.itemsize + scale)


class KVStore:
    """Keys and values of every layer, in blocks. Which sequence owns a block is the scheduler's business.

    Attributes:
        layers: one :class:`LayerKV` for each layer of the model.
        num_blocks: blocks in each.
    """

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        heads, width = config.num_kv_heads, config.head_dim
        shape = (config.num_layers, num_blocks, heads)
        scales = [_zeros((*shape, block_size), SCALE, device) for _ in range(2)] if dtype == torch.int8 else []
        self.layers = LayerKVs(
            _zeros((*shape, width, block_size), dtype, device),
            _zeros((*shape, block_size, width), dtype, device),
            *scales,
        )

    def copy_from(self, source: KVStore, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of every layer from ``source``, which may be on another device.

        Args:
            source: of the same model and block size.
            pairs: (block of ``source``, block here).
        """
        taken = torch.tensor([pair[0] for pair in pairs], device=source.layers[0].key.device)
        given = torch.tensor([pair[1] for pair in pairs], device=self.layers[0].key.device)
        for here, there in zip(self.layers, source.layers, strict=True):
            for to, what in zip(here.tensors, there.tensors, strict=True):
                to[given] = what[taken].to(to.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write all pages, which the system gives zeroed, once they are touched.
    return torch.from_numpy(aligned(math.prod(shape) * dtype.itemsize, np.uint8, zeros=True)).view(dtype).view(shape)
