"""What changes the logits before a token is chosen: forms, least lengths, biases and penalties.

The order is vLLM's. First the tokens that a form does not allow become minus infinity; what is left is the distribution
that logprobs are told of. Then ``min_tokens``, ``logit_bias``, the repetition penalty, and the frequency and presence
penalties. Nothing is kept between steps: the penalties are counted anew from the tokens of the sequence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.scheduling.plan import SequenceChunk


def forbid(logits: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    """Puts minus infinity, in place, at every token that the form of an answer does not allow.

    Args:
        logits: [S, vocab_size] float32.
        chunks: of each row.
    """
    vocab_size = logits.shape[1]
    for row, chunk in enumerate(chunks):
        if chunk.allowed is not None:
            bits = np.unpackbits(np.frombuffer(chunk.allowed, np.uint8), count=vocab_size, bitorder="little")
            # A mask that ends early is padded with zeros: what lies behind its end is forbidden.
            logits[row].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -math.inf)


def adjust(logits: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    """Applies, in place, what the parameters of each row ask for. Arguments as of :func:`forbid`."""
    biases, repetitions, others = _Cells(), _Cells(), _Cells()
    for row, chunk in enumerate(chunks):
        params, context = chunk.sampling, chunk.context
        if params is None or context is None:
            continue
        if len(context.token_ids) - context.num_prompt_tokens < params.min_tokens:
            _forbid_ends(logits[row], context.stop_token_ids, constrained=chunk.allowed is not None)
        if params.logit_bias is not None:
            biases.add(row, params.logit_bias)
        if params.repetition_penalty != 1:
            repetitions.add(row, dict.fromkeys(context.token_ids, params.repetition_penalty))
        frequency, presence = params.frequency_penalty, params.presence_penalty
        if frequency or presence:
            counts = Counter(context.token_ids[context.num_prompt_tokens :])
            others.add(row, {token: frequency * count + presence for token, count in counts.items()})
    biases.change(logits, lambda values, bias: values + bias)
    repetitions.change(logits, lambda values, penalty: torch.where(values > 0, values / penalty, values * penalty))
    others.change(logits, lambda values, penalty: values - penalty)


def _forbid_ends(row: Tensor, stop_token_ids: Iterable[int], *, constrained: bool) -> None:
    """Forbids the tokens that would end the sequence, unless its form allows nothing else."""
    ends = [token for token in stop_token_ids if 0 <= token < len(row)]
    before = row[ends]
    row[ends] = -math.inf
    if constrained and float(row.max()) == -math.inf:
        row[ends] = before


class _Cells:
    """Some logits, each at most once, and a number for each; those of all rows are changed in one operation."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._numbers: list[float] = []

    def add(self, row: int, numbers: Mapping[int, float]) -> None:
        self._rows.extend([row] * len(numbers))
        self._tokens.extend(numbers.keys())
        self._numbers.extend(numbers.values())

    def change(self, logits: Tensor, to: Callable[[Tensor, Tensor], Tensor]) -> None:
        if self._tokens:
            cells = torch.tensor([self._rows, self._tokens], device=logits.device)
            numbers = torch.tensor(self._numbers, dtype=logits.dtype, device=logits.device)
            logits[cells[0], cells[1]] = to(logits[cells[0], cells[1]], numbers)
