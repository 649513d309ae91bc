"""Random steps over a paged cache whose unwritten slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, BatchLayout, KVLayout, LayerKV, LayerKVs, kv_width
from chairlift.model.attention.reference import quantized


@dataclass(frozen=True)
class Heads:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    int8_cache: bool = False

    def backend(self, kind: type[AttentionBackend[Any]]) -> AttentionBackend[Any]:
        return kind(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class PagedBatch:
    """A step: what is computed in it, where it goes, and the cache before it."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: BatchLayout
    kv: LayerKV

    def to(self, device: torch.device) -> PagedBatch:
        layout = self.layout
        return PagedBatch(
            self.query.to(device),
            self.key.to(device),
            self.value.to(device),
            BatchLayout(
                layout.query_start.to(device),
                layout.seq_lens.to(device),
                layout.block_tables.to(device),
                layout.slot_mapping.to(device),
                layout.max_query_len,
                layout.max_seq_len,
            ),
            self.kv_for(KVLayout(), device),
        )

    def kv_for(self, layout: KVLayout, device: torch.device | None = None) -> LayerKV:
        """A copy of the cache that lies in memory like this."""
        blocks, heads, block_size, dim = self.kv.key.shape
        width = kv_width(block_size, dim, self.kv.key.dtype)
        numbers = torch.empty(1, blocks, heads, width, dtype=self.kv.key.dtype, device=device)
        (kv,) = LayerKVs(layout, numbers, block_size)
        for to, what in zip(kv.tensors, self.kv.tensors, strict=True):
            to.copy_(what.reshape(to.shape))
        return kv

    def run(self, backend: AttentionBackend[Any], window: int | None = None) -> tuple[Tensor, LayerKV]:
        """Output and cache after the step; the batch itself is left as it is."""
        kv = self.kv_for(backend.kv_layout(self.kv.key.dtype))
        metadata = backend.prepare(self.layout)
        return backend.forward(self.query, self.key, self.value, kv, metadata, window), kv


def paged_batch(heads: Heads, chunks: list[tuple[int, int]], seed: int = 0) -> PagedBatch:
    """A step of chunks (rows, tokens of the sequence once they are written), in blocks of shuffled order.

    Queries, keys and values are slices of one fused tensor, as a model makes them.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size, kv_heads, dim = heads.block_size, heads.num_kv_heads, heads.head_dim
    counts = [-(-length // block_size) for _, length in chunks]
    # Two blocks more than needed, and unused table entries of 0: both must stay unread.
    blocks = torch.randperm(sum(counts) + 2, generator=generator)
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int32)
    for table, count, owned in zip(tables, counts, blocks[: sum(counts)].split(counts), strict=True):
        table[:count] = owned

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(heads.dtype)

    dtype = torch.int8 if heads.int8_cache else heads.dtype
    numbers = torch.empty(1, len(blocks), kv_heads, kv_width(block_size, dim, dtype), dtype=dtype)
    (kv,) = LayerKVs(KVLayout(), numbers, block_size)
    for tensor in kv.tensors:
        tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
    slots = []
    for table, (rows, length) in zip(tables.long(), chunks, strict=True):
        position = torch.arange(length)
        block, offset = table[position // block_size], position % block_size
        done = length - rows
        key, value = random(done, kv_heads, dim), random(done, kv_heads, dim)
        if kv.key_scale is not None and kv.value_scale is not None:
            key, kv.key_scale[block[:done], :, offset[:done]] = quantized(key)
            value, kv.value_scale[block[:done], :, offset[:done]] = quantized(value)
        kv.key[block[:done], :, offset[:done]] = key
        kv.value[block[:done], :, offset[:done], 0] = value
        slots.append((block * block_size + offset)[done:])

    rows = [n for n, _ in chunks]
    fused = random(sum(rows), heads.num_heads + 2 * kv_heads, dim)
    query, key, value = fused.split([heads.num_heads, kv_heads, kv_heads], dim=1)
    layout = BatchLayout(
        query_start=torch.tensor([0, *rows]).cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in chunks], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=max(rows),
        max_seq_len=max(length for _, length in chunks),
    )
    return PagedBatch(query, key, value, layout, kv)
