"""From a plan to the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.model.attention.base import BatchLayout
from chairlift.scheduling.plan import SequenceChunk, StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's chunks, laid end to end.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each row's position in its sequence.
        layout: where the rows lie and where their keys and values go.
        sampled_rows: [S] int64, the rows from whose logits a token is chosen, in plan order.
        sampled: the chunk of each.
        targets: chunks with prompt tokens whose logprobs are due, and the row in which the first is looked up.
    """

    token_ids: Tensor
    positions: Tensor
    layout: BatchLayout
    sampled_rows: Tensor
    sampled: Sequence[SequenceChunk]
    targets: Sequence[tuple[SequenceChunk, int]]


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """Lays out a plan that has at least one chunk."""
    chunks = plan.chunks
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    seq_lens = starts + lengths
    tables = _block_tables(chunks, -(-seq_lens // block_size))

    sequence = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, bounds[-1])
    sampled = [i for i, chunk in enumerate(chunks) if chunk.sampling is not None]
    rows = np.array([bounds[i + 1] - 1 - chunks[i].num_padding for i in sampled], np.int64)

    def to_device(array: npt.NDArray[np.integer]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    layout = BatchLayout(
        query_start=to_device(bounds.astype(np.int32)),
        seq_lens=to_device(seq_lens.astype(np.int32)),
        block_tables=to_device(tables),
        slot_mapping=to_device(slots),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return Batch(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        layout=layout,
        sampled_rows=to_device(rows),
        sampled=[chunks[i] for i in sampled],
        targets=[
            (chunk, int(bounds[i]) + chunk.prompt_targets.first_row)
            for i, chunk in enumerate(chunks)
            if chunk.prompt_targets is not None
        ],
    )


def _block_tables(chunks: Sequence[SequenceChunk], num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """[B, most blocks] int32: the blocks that each sequence has reached, and 0 behind them."""
    tables = np.zeros((len(chunks), int(num_blocks.max())), np.int32)
    for table, chunk, used in zip(tables, chunks, num_blocks.tolist(), strict=True):
        table[:used] = chunk.block_table[:used]
    return tables
