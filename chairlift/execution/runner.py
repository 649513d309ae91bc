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
from chairlift.model.base import Decoder, ModelOutput
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
        batch, output = self._forward(plan)
        if batch.sampled:
            self._choose(output, batch, plan.step, outcome)
        for chunk, row in batch.targets:
            self._score_prompt(output.hidden, chunk, row, plan.step, outcome)
        return outcome

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Computes the part of a rank other than 0, which chooses no tokens: the same calls of the model as in run."""
        self._swap(plan)
        if not plan.chunks:
            return
        batch, output = self._forward(plan)
        for chunk, row in batch.targets:
            for rows, _ in self._target_rows(chunk, row):
                self.model.logits(output.hidden[rows])

    def _forward(self, plan: StepPlan) -> tuple[Batch, ModelOutput]:
        """The batch, and what the model makes of it."""
        batch = build_batch(plan, self.block_size, self.device)
        metadata = self.attention.prepare(batch.layout)
        wants_logits = not all(map(_takes_best, batch.sampled))
        output = self.model(
            batch.token_ids,
            batch.positions,
            self.kv.layers,
            self.attention,
            metadata,
            batch.sampled_rows,
            wants_logits,
        )
        return batch, output

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

    def _choose(self, output: ModelOutput, batch: Batch, step: int, outcome: StepOutcome) -> None:
        """Takes the tokens that the model knows already and samples the other rows, with the logprobs wanted."""
        chunks = batch.sampled
        tokens = [-1] * len(chunks) if output.best is None else list(output.best)
        scored = len(output.logits) > 0  # or all are to take the best
        rows = [row for row, chunk in enumerate(chunks) if tokens[row] < 0 or (scored and not _takes_best(chunk))]
        outcome.token_ids = tokens
        if not rows:
            return
        # Where there is no best, sampling says what is wrong.
        logits = output.logits if scored else self.model.logits(output.hidden[batch.sampled_rows])
        if len(rows) < len(chunks):
            logits = logits[rows]
        chunks = [chunks[row] for row in rows]
        forbid(logits, chunks)
        num_tops = {i: n for i, c in enumerate(chunks) if c.sampling and (n := c.sampling.logprobs) is not None}
        raw = logits[list(num_tops)] if num_tops else None
        adjust(logits, chunks)
        sampled = _sample_sound(logits, chunks, step, outcome.failed)
        for row, token in zip(rows, sampled, strict=True):
            tokens[row] = token
        if raw is not None:
            found = token_logprobs(raw, [sampled[i] for i in num_tops], list(num_tops.values()))
            by_row = dict(zip((rows[i] for i in num_tops), found, strict=True))
            outcome.logprobs = [by_row.get(row) for row in range(len(tokens))]

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


def _takes_best(chunk: SequenceChunk) -> bool:
    """Whether the largest of the logits as they come decides, and nothing else is to be known of them."""
    params = chunk.sampling
    return (
        params is not None
        and params.greedy
        and params.logprobs is None
        and chunk.context is None
        and chunk.allowed is None
    )


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
