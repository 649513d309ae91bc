"""What every attention backend does: write this step's keys and values into their blocks, then attend over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import torch
from torch import Tensor

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Paged keys and values of one layer.

    Keys are stored with the tokens of a block side by side, so that a kernel can take the scores of a whole block in
    vector registers; values with the head's width side by side, so that it can add a whole row::

        key    [num_blocks, num_kv_heads, head_dim, block_size]
        value  [num_blocks, num_kv_heads, block_size, head_dim]

    An int8 cache has beside them what a step of each token's and head's numbers is worth, float32::

        key_scale, value_scale  [num_blocks, num_kv_heads, block_size]
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.value.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """All that there is for each block, which comes first in their shapes."""
        return [t for t in (self.key, self.value, self.key_scale, self.value_scale) if t is not None]


class LayerKVs(Sequence[LayerKV]):
    """The caches of all layers, of one piece: a kernel that runs a whole step has them all at hand.

    Args:
        keys: [num_layers, num_blocks, num_kv_heads, head_dim, block_size].
        values: [num_layers, num_blocks, num_kv_heads, block_size, head_dim].
        key_scales, value_scales: [num_layers, num_blocks, num_kv_heads, block_size], if the cache is int8.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, key_scales: Tensor | None = None, value_scales: Tensor | None = None
    ) -> None:
        self.keys, self.values = keys, values
        self.key_scales, self.value_scales = key_scales, value_scales
        per_layer = [[None] * len(keys) if scales is None else list(scales) for scales in (key_scales, value_scales)]
        self._layers = [LayerKV(*layer) for layer in zip(keys, values, *per_layer, strict=True)]

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerKV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerKV]: ...
    def __getitem__(self, index: int | slice) -> LayerKV | Sequence[LayerKV]:
        return self._layers[index]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the token rows of a step lie: a ragged batch of chunks, laid end to end.

    Attributes:
        query_start: [B + 1] int32; rows ``query_start[i]`` to ``query_start[i + 1]`` are chunk i.
        seq_lens: [B] int32; tokens of sequence i in the cache once this step is written. The chunk is its tail.
        block_tables: [B, max_blocks] int32; unused entries are 0.
        slot_mapping: [T] int64; row t is written to slot ``slot % block_size`` of block ``slot // block_size``.
        max_query_len: rows of the longest chunk.
        max_seq_len: tokens of the longest sequence.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class AttentionBackend(ABC, Generic[M]):
    """Causal attention over a paged KV cache. The batch travels as an argument, never in a global.

    Row t of a chunk, at position p of its sequence, sees positions 0 to p, or with a window of w the last w of them,
    p included.
    """

    name: str

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.scale = head_dim**-0.5

    @abstractmethod
    def prepare(self, layout: BatchLayout) -> M:
        """Derives once per step what every layer needs."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, metadata: M, sliding_window: int | None = None
    ) -> Tensor:
        """Writes ``key`` and ``value`` into ``kv``, then attends.

        Args:
            query: [T, num_heads, head_dim], rotated.
            key: [T, num_kv_heads, head_dim], rotated.
            value: [T, num_kv_heads, head_dim].
            kv: this layer's cache, changed in place.
            metadata: from :meth:`prepare` for this step.
            sliding_window: how many positions back a row sees, itself included; ``None`` for all.

        Returns:
            [T, num_heads, head_dim] in the query's dtype.
        """
