"""The least that drives a model: paged KV, the reference attention, prompts in chunks, greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, BatchLayout, LayerKVs, kv_width
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.base import Decoder


@dataclass
class Generation:
    """One sequence, and what came of it: the logits [n, vocab] that its n generated tokens were taken from."""

    tokens: list[int]
    prompt_length: int
    block_table: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int = 7,
    block_size: int = 4,
    attention: AttentionBackend[Any] | None = None,
    int8_cache: bool = False,
) -> list[Generation]:
    """Runs all prompts together, the i-th from step i on, so that steps mix chunks of prompts with decoding rows."""
    config, weight = model.config, model.embedding
    per_sequence = -(-(max(map(len, prompts)) + num_tokens) // block_size)
    num_blocks = per_sequence * len(prompts)
    # Tables that run backwards and interleave: no order of blocks is taken for granted.
    sequences = [
        Generation(list(prompt), len(prompt), list(range(num_blocks - 1 - i, -1, -len(prompts))))
        for i, prompt in enumerate(prompts)
    ]
    if attention is None:
        attention = ReferenceAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=weight.dtype,
        )
    dtype = torch.int8 if int8_cache else weight.dtype
    width = kv_width(block_size, config.head_dim, dtype)
    numbers = torch.empty(
        (config.num_layers, num_blocks, config.num_kv_heads, width), dtype=dtype, device=weight.device
    )
    kv_caches = LayerKVs(attention.kv_layout(dtype), numbers, block_size)
    for layer in kv_caches:
        for tensor in layer.tensors:
            tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
    step = 0
    while running := [s for s in sequences[: step + 1] if len(s.generated) < num_tokens]:
        _step(model, kv_caches, attention, running, chunk, block_size)
        step += 1
    return sequences


def _step(
    model: Decoder,
    kv_caches: LayerKVs,
    attention: AttentionBackend[Any],
    running: list[Generation],
    chunk: int,
    block_size: int,
) -> None:
    device = model.embedding.device
    chunks = [s.tokens[s.computed : s.computed + chunk] for s in running]
    positions = [list(range(s.computed, s.computed + len(c))) for s, c in zip(running, chunks, strict=True)]
    for sequence, tokens in zip(running, chunks, strict=True):
        sequence.computed += len(tokens)
    starts = torch.tensor([0, *map(len, chunks)]).cumsum(0)
    layout = BatchLayout(
        query_start=starts.int().to(device),
        seq_lens=torch.tensor([s.computed for s in running], dtype=torch.int32, device=device),
        block_tables=torch.tensor([s.block_table for s in running], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(
            [
                s.block_table[p // block_size] * block_size + p % block_size
                for s, ps in zip(running, positions, strict=True)
                for p in ps
            ],
            device=device,
        ),
        max_query_len=max(map(len, chunks)),
        max_seq_len=max(s.computed for s in running),
    )
    output = model(
        torch.tensor([*chain(*chunks)], device=device),
        torch.tensor([*chain(*positions)], device=device),
        kv_caches,
        attention,
        attention.prepare(layout),
        starts[1:].to(device) - 1,
    )
    # Fused models keep them until the next step only.
    for sequence, row in zip(running, output.logits.cpu().clone(), strict=True):
        if sequence.computed == len(sequence.tokens):
            sequence.logits.append(row)
            sequence.tokens.append(int(row.argmax()))
