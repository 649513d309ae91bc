"""What one step computes, and what came of it: the whole of what a scheduler and an executor say to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from chairlift.scheduling.sampling_params import SamplingParams


class TokenLogprob(NamedTuple):
    """How likely a token was, by the model's own scores: before penalties, bias and temperature.

    Attributes:
        token_id: the token that was sampled, or stands in the prompt.
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token; those that tie share the better rank.
        top: (token id, logprob) of the most likely tokens, in falling order, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceContext:
    """What the logits of one sequence are adjusted by, beside the parameters of its request.

    Attributes:
        token_ids: the whole sequence so far, prompt and output. The scheduler's own list, not a copy: valid until the
            plan is committed.
        num_prompt_tokens: how many of them are prompt.
        stop_token_ids: what ``min_tokens`` forbids: the request's own and the model's end-of-sequence tokens.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Prompt tokens whose logprobs are due in this step. Each is due once, preempted or not.

    Attributes:
        num_top: how many of the most likely tokens are wanted with each.
        first_row: row of the chunk whose logits the first of them is looked up in.
        token_ids: the tokens; each belongs to the row after the one before it.
    """

    num_top: int
    first_row: int
    token_ids: Sequence[int]


# A step makes one of these for every running request, and frozen ones take three times as long to make. Nobody changes
# one that is made; the same goes for SequenceDelta.
@dataclass(slots=True)
class SequenceChunk:
    """The tokens of one sequence that a step computes: a piece of its prompt, or its newest token.

    The keys and values of ``token_ids[i]`` belong at position ``start + i``, which is slot
    ``(start + i) % block_size`` of block ``block_table[(start + i) // block_size]``.

    Attributes:
        request_id: the engine's own id, unique for the life of the engine.
        token_ids: the tokens to compute, at least one.
        start: the position of the first of them; everything before it is in the KV cache already.
        block_table: ids of the blocks that hold the sequence, long enough for every token here. The scheduler's own
            list, not a copy: valid until this plan is committed.
        sampling: how to choose the next token from the logits of the last token that is not padding; ``None`` where
            the prompt is not complete yet, and no token is sampled. Its ``seed`` is never ``None``.
        num_padding: how many tokens at the end of ``token_ids`` are padding, computed like any other and of no use
            (static batching only). No real token ever attends to them.
        context: set where a token is sampled and ``sampling`` adjusts the logits.
        prompt_targets: set where logprobs of prompt tokens are due.
        allowed: the tokens that may be sampled, as a bitmask: bit ``i % 32`` of the ``i // 32``-th int32, in
            little-endian order, belongs to token ``i``. What lies behind its end is forbidden. Set by the engine's
            loop, between plan and execution, where the request asks for a form (``sampling.structured``); valid
            until the plan is committed. ``None`` allows all.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    num_padding: int = 0
    context: SequenceContext | None = None
    prompt_targets: PromptTargets | None = None
    allowed: bytes | bytearray | memoryview | None = None

    @property
    def sample_position(self) -> int:
        """The position of the token that is sampled, which with the seed determines its noise."""
        return self.start + len(self.token_ids) - self.num_padding


@dataclass(slots=True)
class RowCounts:
    """The token rows of one step by kind. Each computed row is counted once.

    Attributes:
        prefill: prompt tokens computed for the first time.
        decode: generated tokens computed for the first time, for a client who still wants the next one.
        recomputed: tokens computed before, whose keys and values a preemption threw away.
        padding: rows that fill prompts up to the longest one of a static batch.
        ended: rows of sequences that have ended, computed on because their static batch has not.
    """

    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    padding: int = 0
    ended: int = 0

    @property
    def total(self) -> int:
        """All rows computed."""
        return self.useful + self.wasted

    @property
    def useful(self) -> int:
        """Rows that a client receives or that a prompt needed once."""
        return self.prefill + self.decode

    @property
    def wasted(self) -> int:
        """Rows nobody gains from."""
        return self.recomputed + self.padding + self.ended


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running request that had to give way, and what that costs.

    Attributes:
        request_id: who gave way.
        wanted_by: the request for whose next block it did; its own id where it was the last in rank.
        swapped: whether its blocks moved to the host; else they are computed again.
        num_tokens: tokens whose keys and values it had: lost, or moved.
        num_blocks: blocks moved; 0 where it is computed again.
        host_full: it would have been swapped, but the host had no room.
    """

    request_id: str
    wanted_by: str
    swapped: bool
    num_tokens: int
    num_blocks: int = 0
    host_full: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, self-contained: an executor needs nothing else and keeps nothing from one step to the next.

    Order inside a step: swap out, swap in, forward, sample.

    Attributes:
        step: number of the step, from 0.
        chunks: what to compute, in the order the rows are laid out.
        rows: the same rows counted by kind.
        swap_out: (device block, host block) pairs to copy before anything else.
        swap_in: (host block, device block) pairs to copy next.
        admitted: ids of the requests that begin (or begin again) in this step.
        preempted: the requests put aside to make room for this step.
        num_cached_tokens: tokens of those admitted that need not be computed, because the prefix cache has them.
        num_looked_up_tokens: tokens of those admitted that were looked up there.
        wait_until: of an empty plan: when there will be something to do, if no request comes before.
    """

    step: int
    chunks: Sequence[SequenceChunk]
    rows: RowCounts
    swap_out: Sequence[tuple[int, int]] = ()
    swap_in: Sequence[tuple[int, int]] = ()
    admitted: Sequence[str] = ()
    preempted: Sequence[Preemption] = ()
    num_cached_tokens: int = 0
    num_looked_up_tokens: int = 0
    wait_until: float | None = None

    @property
    def num_tokens(self) -> int:
        """Rows in the forward pass, padding included."""
        return sum(len(c.token_ids) for c in self.chunks)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not self.chunks and not self.swap_out and not self.swap_in


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor returns.

    Attributes:
        token_ids: one sampled token for each chunk of the plan whose ``sampling`` is set, in plan order.
        elapsed: seconds that the step took inside the executor; a virtual clock moves by this much.
        failed: why no token could be sampled, by id of the request; what stands in its place means nothing.
        logprobs: of each sampled token, ``None`` where they are not wanted; empty where nobody wants any.
        prompt_logprobs: of the plan's :class:`PromptTargets`, by id of the request.
    """

    token_ids: Sequence[int]
    elapsed: float
    failed: Mapping[str, str] = field(default_factory=dict)
    logprobs: Sequence[TokenLogprob | None] = ()
    prompt_logprobs: Mapping[str, Sequence[TokenLogprob]] = field(default_factory=dict)

    @property
    def sampled(self) -> Iterable[tuple[int, TokenLogprob | None]]:
        """Each sampled token with its logprob."""
        return zip(self.token_ids, self.logprobs or repeat(None), strict=False)


@dataclass(slots=True)
class RequestTiming:
    """When the stages of one request's life began, in seconds of the engine's clock; ``None`` where it never did.

    Attributes:
        arrival: the engine was told of it.
        admitted: first planned into a step.
        first_token: its first token was sampled.
        finished: it ended.
        preemptions: how often it was put aside.
        cached_tokens: prompt tokens taken from the prefix cache when it was first admitted.
    """

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class SequenceDelta:
    """New tokens of one request, and whether they are its last.

    Attributes:
        request_id: the engine's own id.
        token_ids: tokens generated since the last delta; empty where an end, or a part of the prompt, brings none.
        finish_reason: ``None`` while it goes on; else "stop", "length", "abort" or "error".
        stop_reason: the token id that ended it, where one of the request's own ``stop_token_ids`` did.
        error: what went wrong, where the reason is "error".
        timing: set on the first delta and on the last.
        logprobs: of each of ``token_ids``; empty where they are not wanted.
        prompt_logprobs: of the next prompt tokens, from the second one on; all have come when the first token does.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    timing: RequestTiming | None = None
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()

    def after(self, earlier: SequenceDelta) -> SequenceDelta:
        """This delta and the one before it as one, for a reader that fetched neither."""
        return replace(
            self,
            token_ids=(*earlier.token_ids, *self.token_ids),
            timing=self.timing or earlier.timing,
            logprobs=(*earlier.logprobs, *self.logprobs),
            prompt_logprobs=(*earlier.prompt_logprobs, *self.prompt_logprobs),
        )

    def __reduce__(self) -> tuple[object, ...]:
        # A step sends one for every running request to another process; what dataclasses do takes three times as long.
        fields = (self.request_id, self.token_ids, self.finish_reason, self.stop_reason, self.error, self.timing)
        return SequenceDelta, (*fields, self.logprobs, self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, small enough to keep for every step.

    Attributes:
        step: number of the step.
        time: when it was planned, in seconds of the engine's clock.
        elapsed: seconds inside the executor.
        rows: token rows by kind.
        running, waiting, swapped: requests in each state after the step.
        blocks_used, blocks_total: device KV blocks owned by requests after the step, and all there are.
        admitted, finished, preempted: requests that did so in this step.
        blocks_swapped_out, blocks_swapped_in: KV blocks copied to the host, and back.
        sequences, sampled, context, pairs: as in :class:`chairlift.scheduling.work.StepWork`; with the rows, what the
            step's time depends on.
        cached_tokens, looked_up_tokens: tokens of those admitted that the prefix cache had, of those looked up there.
    """

    step: int
    time: float
    elapsed: float
    rows: RowCounts = field(default_factory=RowCounts)
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    admitted: int = 0
    finished: int = 0
    preempted: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    sequences: int = 0
    sampled: int = 0
    context: int = 0
    pairs: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
