"""Runs one step of a model: plan, batch, forward pass, logits of the rows that are asked for, tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chairlift.execution.adjust import adjust, forbid
from chairlift.execution.batch import Batch, build_batch
from chairlift.execution.kv_store import KVStore
from chairlift.execution.logprobs import token_logprobs
from chairlift.execution.sampler import MAX_NUMBERS, NonFiniteLogitsError, sample
from chairlift.model.attention.base import AttentionBackend
from chairlift.model.base import Decoder
from chairlift.scheduling.plan import SequenceChunk, StepPlan, TokenLogprob


@dataclass(slots=True)
class StepOutcome:
    """What came of a step.

    Attributes:
        token_ids: the sampled tokens, in plan order.
        failed: by request id, why the model's scores for it are nonsense, where they are: the token in its place is
            then one of no meaning.
        logprobs: of each token, where they are wanted; empty where nobody wants any.
        prompt_logprobs: of the prompt tokens that were due, by request id.
    """

    token_ids: list[int] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)


class ModelRunner:
    """A model with its attention backend and its KV cache. Keeps nothing of a plan once it has run."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend[Any],
        kv: KVStore,
        *,
        block_size: int,
        device: torch.device,
        host: KVStore | None = None,
    ) -> None:
        self.host = host
        self.model = model
        self.attention = attention
        self.kv = kv
        self.block_size = block_size
        self.device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Computes a plan."""
        self._swap(plan)
        outcome = StepOutcome()
        if not plan.chunks:
            return outcome
        batch, hidden, logits = self._forward(plan)
        if batch.sampled:
            self._choose(logits, batch, plan.step, outcome)
        for chunk, row in batch.targets:
            self._score_prompt(hidden, chunk, row, plan.step, outcome)
        return outcome

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Computes the part of a rank other than 0, which chooses no tokens: the same calls of the model as in run."""
        self._swap(plan)
        if not plan.chunks:
            return
        batch, hidden, _ = self._forward(plan)
        for chunk, row in batch.targets:
            for rows, _ in self._target_rows(chunk, row):
                self.model.logits(hidden[rows])

    def _forward(self, plan: StepPlan) -> tuple[Batch, Tensor, Tensor]:
        """The batch, its residual stream, and the logits of the rows that are sampled."""
        batch = build_batch(plan, self.block_size, self.device)
        metadata = self.attention.prepare(batch.layout)
        hidden, logits = self.model(
            batch.token_ids, batch.positions, self.kv.layers, self.attention, metadata, batch.sampled_rows
        )
        return batch, hidden, logits

    def _target_rows(self, chunk: SequenceChunk, row: int) -> Iterator[tuple[slice, Sequence[int]]]:
        """Rows and tokens of a prompt to look up, a few at a time: the logits of a long one would fill the memory."""
        assert chunk.prompt_targets is not None  # noqa: S101 - of a chunk that has some
        token_ids = chunk.prompt_targets.token_ids
        size = max(1, MAX_NUMBERS[self.device.type] // self.model.config.vocab_size)
        for first in range(0, len(token_ids), size):
            part = token_ids[first : first + size]
            yield slice(row + first, row + first + len(part)), part

    def _score_prompt(self, hidden: Tensor, chunk: SequenceChunk, row: int, step: int, outcome: StepOutcome) -> None:
        """Looks prompt tokens up."""
        targets = chunk.prompt_targets
        assert targets is not None  # noqa: S101 - of a chunk that has some
        scores: list[TokenLogprob] = []
        for rows, token_ids in self._target_rows(chunk, row):
            logits = self.model.logits(hidden[rows])
            scores += token_logprobs(logits, token_ids, [targets.num_top] * len(token_ids))
        if not all(math.isfinite(score.logprob) for score in scores):
            of = f"request {chunk.request_id} in step {step}"
            outcome.failed[chunk.request_id] = str(NonFiniteLogitsError([row], of))
        outcome.prompt_logprobs[chunk.request_id] = scores

    def _choose(self, logits: Tensor, batch: Batch, step: int, outcome: StepOutcome) -> None:
        """Samples the rows that are due, with the logprobs that are wanted."""
        chunks = batch.sampled
        forbid(logits, chunks)
        num_tops = {row: n for row, c in enumerate(chunks) if c.sampling and (n := c.sampling.logprobs) is not None}
        raw = logits[list(num_tops)] if num_tops else None
        adjust(logits, chunks)
        outcome.token_ids = _sample_sound(logits, chunks, step, outcome.failed)
        if raw is not None:
            tokens = [outcome.token_ids[row] for row in num_tops]
            scores = dict(zip(num_tops, token_logprobs(raw, tokens, list(num_tops.values())), strict=True))
            outcome.logprobs = [scores.get(row) for row in range(len(chunks))]

    def _swap(self, plan: StepPlan) -> None:
        """Moves blocks before anything is written: a block that is swapped out may be somebody else's in this step."""
        if not plan.swap_out and not plan.swap_in:
            return
        if self.host is None:
            raise RuntimeError(f"step {plan.step} swaps, but there is no swap space")
        if plan.swap_out:
            self.host.copy_from(self.kv, plan.swap_out)
        if plan.swap_in:
            self.kv.copy_from(self.host, plan.swap_in)


def _sample_sound(logits: Tensor, chunks: Sequence[SequenceChunk], step: int, failed: dict[str, str]) -> list[int]:
    """Samples each row. One whose logits are nonsense is told of in ``failed`` and costs the others nothing."""
    params = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
    positions = [chunk.sample_position for chunk in chunks]
    try:
        return sample(logits, params, positions)
    except NonFiniteLogitsError as error:
        for row in error.rows:
            of = f"request {chunks[row].request_id} in step {step}"
            nothing_left = chunks[row].allowed is not None and float(logits[row].max()) == -math.inf
            failed[chunks[row].request_id] = (
                f"the form of {of} allows no token any more" if nothing_left else str(NonFiniteLogitsError([row], of))
            )
            logits[row] = 0
        return sample(logits, params, positions)
