"""What every attention backend does: write this step's keys and values into their blocks, then attend over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

import torch
from torch import Tensor

M = TypeVar("M")


SCALE = torch.float32
"""What an int8 cache keeps for each token and head beside its numbers, of keys and of values."""


def kv_width(block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of this type that a block and a head take: keys, values, and the scales of either."""
    return 2 * block_size * (head_dim + (SCALE.itemsize if dtype == torch.int8 else 0))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the keys and the values of a block and a head lie in memory, which is up to the backend that reads them.

    Attributes:
        keys_by_token: a token's keys lie side by side; else all tokens' first numbers do, then all their second ones.
        values_in_turns: values of so many tokens lie in turns, the first number of each, then the second of each.
    """

    keys_by_token: bool = False
    values_in_turns: int = 1


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Paged keys and values of one layer: views of memory that a :class:`KVLayout` describes.

    Values have an axis for the place in a group of tokens whose values lie in turns::

        key    [num_blocks, num_kv_heads, block_size, head_dim]
        value  [num_blocks, num_kv_heads, block_size / values_in_turns, values_in_turns, head_dim]

    An int8 cache has beside them what a step of each token's and head's numbers is worth, float32::

        key_scale, value_scale  [num_blocks, num_kv_heads, block_size]

    Made by :class:`LayerKVs`. ``numbers`` is all of that memory, [num_blocks, num_kv_heads, :func:`kv_width`].
    """

    layout: KVLayout
    numbers: Tensor
    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.key.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """All that there is for each block, which comes first in their shapes."""
        return [t for t in (self.key, self.value, self.key_scale, self.value_scale) if t is not None]


class LayerKVs(Sequence[LayerKV]):
    """The caches of all layers, of one piece: a kernel that runs a whole step has them all at hand.

    What belongs to a block and a head lies side by side: first its keys, then its values, and for int8 the scales of
    either. All are read at every step, and so are found by one look at the tables of the processor's pages.

    Args:
        layout: how keys and values lie there.
        numbers: [num_layers, num_blocks, num_kv_heads, :func:`kv_width`], contiguous.
        block_size: tokens in a block.
    """

    def __init__(self, layout: KVLayout, numbers: Tensor, block_size: int) -> None:
        self.layout, self.numbers, self.block_size = layout, numbers, block_size
        per_token = numbers.shape[-1] // (2 * block_size)
        head_dim = per_token - (SCALE.itemsize if numbers.dtype == torch.int8 else 0)
        heads, half = numbers.shape[:3], block_size * head_dim
        keys, values, rest = numbers.tensor_split((half, 2 * half), dim=-1)
        if layout.keys_by_token:
            keys = keys.view(*heads, block_size, head_dim)
        else:
            keys = keys.view(*heads, head_dim, block_size).transpose(-1, -2)
        values = values.view(*heads, -1, head_dim, layout.values_in_turns).transpose(-1, -2)
        scales = rest.view(SCALE).view(*heads, 2, block_size).unbind(3) if numbers.dtype == torch.int8 else ()
        self._layers = [LayerKV(layout, *layer) for layer in zip(numbers, keys, values, *scales, strict=True)]

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

    def kv_layout(self, cache_dtype: torch.dtype) -> KVLayout:
        """How keys and values have to lie in a cache of this type."""
        del cache_dtype
        return KVLayout()

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
