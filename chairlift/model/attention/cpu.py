"""Attention on the CPU, by a Numba kernel that reads the paged cache in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, BatchLayout, KVLayout, LayerKV, LayerKVs
from chairlift.model.kernels import kinds, tiles
from chairlift.model.kernels.attention_items import PADDED, Shape
from chairlift.model.kernels.memory import WORD_BYTES
from chairlift.model.kernels.paged_attention import Scratches, make_scratch, paged_attention
from chairlift.model.kernels.pool import ComputeThreads
from chairlift.model.kernels.simd import LANES
from chairlift.model.kernels.threads import COUNTER
from chairlift.model.kernels.work_plan import plan_work

Ints = npt.NDArray[np.int32]

# A work item takes about this many query rows (tokens times the heads that share a key/value head), so that they and
# their outputs stay in the first-level cache.
TILE_ROWS = 32
LOG2_E = 1.4426950408889634


class WorkPlan(NamedTuple):
    """A step's work for one window: items and merges as the kernel numbers their columns, and the items by thread.

    Attributes:
        items: [N, 8] int32.
        bounds: [threads + 1] int64; items ``bounds[w]`` to ``bounds[w + 1]`` are thread w's.
        merges: [M, 5] int32.
        num_partials: partial results to keep.
    """

    items: Ints
    bounds: npt.NDArray[np.int64]
    merges: Ints
    num_partials: int


@dataclass(slots=True)
class CpuMetadata:
    """The layout as arrays, and a work plan for each window that a layer has asked for."""

    query_start: Ints
    seq_lens: Ints
    block_tables: Ints
    slots: npt.NDArray[np.int64]
    plans: dict[int, WorkPlan] = field(default_factory=dict)


class CpuAttention(AttentionBackend[CpuMetadata]):
    """Paged attention over a float32, bfloat16 or int8 cache.

    Where the processor has matrix tiles, a bfloat16 model attends in them, few rows to an int8 cache by products of
    int8; sums are float32. All else is float32.

    Attributes:
        kind: how it computes.
        threads: those that run its kernel: as many as torch has when it is made.
    """

    name = "cpu"

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        if reason := unsupported(dtype, head_dim):
            raise ValueError(reason)
        if block_size & (block_size - 1):
            raise ValueError(f"blocks must be a power of two long, not {block_size}")
        self.block_shift = block_size.bit_length() - 1
        in_tiles = dtype == torch.bfloat16 and tiles.available() and tiles_fit(block_size, head_dim)
        self.kind: kinds.Kind = kinds.BFloat16Tiles() if in_tiles else kinds.Float32()
        self._group = num_heads // num_kv_heads
        self._tile_tokens = max(1, TILE_ROWS // self._group)
        self._scratch: dict[np.dtype[Any], Scratches] = {}
        self.threads = ComputeThreads(torch.get_num_threads())
        self.tile_rows = -(-self._tile_tokens * self._group // PADDED) * PADDED

    def kv_layout(self, cache_dtype: torch.dtype) -> KVLayout:
        """See :meth:`AttentionBackend.kv_layout`."""
        if isinstance(self.kind, kinds.Float32):
            return KVLayout()
        return KVLayout(keys_by_token=True, values_in_turns=WORD_BYTES // cache_dtype.itemsize)

    def pages(self, kv: LayerKV | LayerKVs) -> npt.NDArray[Any]:
        """A cache as kernels take it, of one layer or of all.

        Raises:
            ValueError: it does not lie in memory as they read it.
        """
        wanted = self.kv_layout(kv.numbers.dtype)
        if (kv.layout, kv.block_size) != (wanted, self.block_size):
            raise ValueError(
                f"this backend reads blocks of {self.block_size} and {wanted}, not {kv.block_size} and {kv.layout}"
            )
        return _flat(kv.numbers)

    def prepare(self, layout: BatchLayout) -> CpuMetadata:
        """See :meth:`AttentionBackend.prepare`."""
        return CpuMetadata(
            layout.query_start.numpy(),
            layout.seq_lens.numpy(),
            np.ascontiguousarray(layout.block_tables.numpy()),
            layout.slot_mapping.numpy(),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: LayerKV,
        metadata: CpuMetadata,
        sliding_window: int | None = None,
    ) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        window = sliding_window or 0
        plan = self.plan(metadata, window)
        shape = self._shape(window)
        output = torch.empty(query.shape, dtype=query.dtype)
        partial = np.empty((plan.num_partials, self.tile_rows, self.head_dim + 2), np.float32)
        strides = (query.stride(0), key.stride(0), value.stride(0))
        pages = self.pages(kv)
        self.threads.run(
            paged_attention, _rows(query), _rows(key), _rows(value), strides, pages, metadata.slots,
            metadata.block_tables, plan.items, plan.bounds, plan.merges, np.float32(self.scale * LOG2_E), shape,
            partial, self.scratch(pages.dtype), _flat(output), np.zeros(COUNTER, np.int64), tiles.full_tiles(),
        )  # fmt: skip
        return output

    def scratch(self, cache_dtype: np.dtype[Any]) -> Scratches:
        """The threads' working memory for a cache of this type."""
        kept = self._scratch.get(cache_dtype)
        if kept is None:
            kept = self._scratch[cache_dtype] = make_scratch(self._shape(0), self.threads.count, cache_dtype)
        return kept

    def _shape(self, window: int) -> Shape:
        return Shape(
            self.kind, self.num_heads, self.num_kv_heads, self.head_dim, self.block_shift, window, self.tile_rows
        )  # fmt: skip

    def plan(self, metadata: CpuMetadata, window: int) -> WorkPlan:
        """The step's work for a window (0 for none), made when it is first asked for."""
        plan = metadata.plans.get(window)
        if plan is None:
            made = plan_work(
                metadata.query_start, metadata.seq_lens, window, self._tile_tokens, self._group, self.num_kv_heads,
                self.threads.count,
            )  # fmt: skip
            plan = metadata.plans[window] = WorkPlan(*made)
        return plan


def bits_of(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's memory as kernels take it: bfloat16 as its bits, in int16."""
    bits: npt.NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return bits


def _flat(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a contiguous tensor in one row."""
    return bits_of(tensor.view(-1))


def _rows(tensor: Tensor) -> Any:
    """The memory under a tensor [T, heads, dim] from its first number to its last, whose rows may lie apart."""
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"each row's heads must lie side by side, got strides {tensor.stride()}")
    span = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1] * tensor.shape[2]
    return _flat(tensor.as_strided((span,), (1,)))


def tiles_fit(block_size: int, head_dim: int) -> bool:
    """Whether blocks and heads are as long as tiles are wide."""
    return block_size >= LANES and head_dim % (2 * LANES) == 0


def unsupported(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this backend cannot serve such heads, or ``None`` if it can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"attention backend 'cpu' computes in float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % LANES:
        return f"attention backend 'cpu' needs a head width that is a multiple of {LANES}, not {head_dim}"
    return None
