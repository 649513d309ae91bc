"""Attention in plain torch, on any device and in any precision: the truth that the other backends are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, BatchLayout, LayerKV

# The scores of a long chunk against a long context would not fit in memory at once: rows are taken in tiles whose
# scores are at most this many numbers (256 MiB of float32).
MAX_SCORES = 1 << 26


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One chunk: rows ``first`` to ``last`` are the tail of a sequence of ``seq_len`` tokens held in ``blocks``."""

    first: int
    last: int
    seq_len: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """Where each row is written ([T] int64 block and offset in it), and the chunks."""

    write_block: Tensor
    write_offset: Tensor
    sequences: list[SequenceRows]


class ReferenceAttention(AttentionBackend[ReferenceMetadata]):
    """Gathers each sequence's blocks and takes a float32 softmax over its scores, one sequence after the other."""

    name = "reference"

    def prepare(self, layout: BatchLayout) -> ReferenceMetadata:
        """See :meth:`AttentionBackend.prepare`."""
        bounds = layout.query_start.tolist()
        tables = layout.block_tables.long()
        sequences = [
            SequenceRows(bounds[i], bounds[i + 1], seq_len, tables[i, : -(-seq_len // self.block_size)])
            for i, seq_len in enumerate(layout.seq_lens.tolist())
        ]
        return ReferenceMetadata(
            layout.slot_mapping // self.block_size, layout.slot_mapping % self.block_size, sequences
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: LayerKV,
        metadata: ReferenceMetadata,
        sliding_window: int | None = None,
    ) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        self._write(key, value, kv, metadata)
        output, all_values = torch.empty_like(query), kv.value.flatten(2, 3)
        for rows in metadata.sequences:
            # Cut at the sequence's end before any arithmetic: what lies behind it in its last block is not defined.
            keys = _read(kv.key, kv.key_scale, rows)
            values = _read(all_values, kv.value_scale, rows)
            tile = max(1, MAX_SCORES // (self.num_heads * rows.seq_len))
            for first in range(rows.first, rows.last, tile):
                last = min(first + tile, rows.last)
                position = rows.seq_len - (rows.last - first)
                output[first:last] = self._attend(query[first:last], keys, values, position, sliding_window)
        return output

    def _write(self, key: Tensor, value: Tensor, kv: LayerKV, metadata: ReferenceMetadata) -> None:
        block, offset = metadata.write_block, metadata.write_offset
        if kv.key_scale is not None and kv.value_scale is not None:
            key, kv.key_scale[block, :, offset] = quantized(key)
            value, kv.value_scale[block, :, offset] = quantized(value)
        kv.key[block, :, offset] = key
        turns = kv.value.shape[3]
        kv.value[block, :, offset // turns, offset % turns] = value

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> Tensor:
        """Attends from rows at ``position`` and on: query [t, heads, dim]; keys, values [kv_heads, s, dim] float32."""
        group = self.num_heads // self.num_kv_heads
        grouped = query.float().reshape(len(query), self.num_kv_heads, group, self.head_dim)
        scores = torch.einsum("tkgd,ksd->kgts", grouped, keys) * self.scale
        seen_by = torch.arange(position, position + len(query), device=query.device)[:, None]
        at = torch.arange(keys.shape[1], device=query.device)
        hidden = at > seen_by
        if window is not None:
            hidden |= at <= seen_by - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("kgts,ksd->tkgd", weights, values).flatten(1, 2).to(query.dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers of [..., dim], and for each row the float32 scale that makes its largest one 127."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1).clamp(min=1e-30) / 127
    return (wide * (1 / scale)[..., None]).round().to(torch.int8), scale


def _read(numbers: Tensor, scale: Tensor | None, rows: SequenceRows) -> Tensor:
    """One sequence's tokens of [blocks, kv_heads, block_size, dim]: [kv_heads, seq_len, dim] float32."""
    read = numbers[rows.blocks].transpose(0, 1).flatten(1, 2)[:, : rows.seq_len].float()
    return read if scale is None else read * scale[rows.blocks].transpose(0, 1).flatten(1, 2)[:, : rows.seq_len, None]
