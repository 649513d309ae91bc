"""Request-level static batching: the honest baseline.

A batch is filled, or a time runs out; its prompts are padded to the longest and computed; then every row is stepped
until the last sequence ends, and all answers are released together. Rows of sequences that have ended are computed on,
and the padding is computed too: that is what the policy costs, and it is counted, not imitated.

Layout. Prompts are padded on the right. A pad's keys and values lie in slots of the row's own reservation, after its
prompt, where no real token looks, and the generated tokens overwrite them. So a row's answer is the same, to the token,
as under any other policy::

    prompt  p p p p p p p p ┐           p p p p p p p p g g g g
            p p p · · · · · ┘ prefill,  p p p g g g · · · · · ·   each row generates
                                                                  from its own length

Memory. Each row reserves, for the life of its batch, what the longest sequence could fill that its batch may make of
it: its prompt, padding included, and as many new tokens as any request of the batch may ask for.

Why every request ends: a batch takes at most as many steps as its prompts need and its longest request may generate;
while it runs nobody is admitted, and when it ends the requests that waited longest make the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import RowCounts, SequenceChunk, SequenceDelta, StepPlan, StepResult, TokenLogprob
from chairlift.scheduling.queue import WaitingQueue
from chairlift.scheduling.request import FINISH_REASONS, Request, Status
from chairlift.scheduling.scheduler import RequestRefusedError, set_longest

PAD_TOKEN_ID = 0  # any token will do: nothing looks at it


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """How batches are made.

    Attributes:
        batch_size: sequences in a full batch.
        timeout: seconds after which the one that waits longest is served in a batch that is not full.
        max_num_batched_tokens: most token rows in a step; padded prompts are computed in slices of this many.
    """

    batch_size: int = 8
    timeout: float = 0.1
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"static batch size must be at least 1, got {self.batch_size}")
        if self.timeout < 0:
            raise ValueError(f"static batch timeout must be at least 0 seconds, got {self.timeout}")
        if self.max_num_batched_tokens < self.batch_size:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least the static batch size "
                f"({self.batch_size}), so that every row of a batch can be computed in a step"
            )


class _Row:
    """One place in a batch, which stays occupied until the batch ends.

    Attributes:
        reserved: tokens that its blocks can hold.
        wanted: until the request has all its tokens, or nobody waits for them any more.
        num_tokens, newest_token: of the sequence, and of what the row goes on to generate after its end.
        sampling: how it is sampled. Nobody asks for the logprobs, or the form, of what comes after its end.
        logprobs, prompt_logprobs: for the answer.
    """

    def __init__(self, request: Request, reserved: int) -> None:
        self.request = request
        self.reserved = reserved
        self.wanted = True
        self.num_tokens = request.num_tokens
        self.newest_token = request.token_ids[-1]
        self.sampling = request.params
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    def take(self, token_id: int, logprob: TokenLogprob | None, now: float) -> None:
        self.num_tokens += 1
        self.newest_token = token_id
        if not self.wanted:
            return
        if self.request.timing.first_token is None:
            self.request.timing.first_token = now
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.request.append(token_id):
            self.end()

    def end(self) -> None:
        """Nobody waits for more of it."""
        self.wanted = False
        self.sampling = replace(self.sampling, logprobs=None, structured=None)


class _Batch:
    """Rows that begin together and end together."""

    def __init__(self, rows: list[_Row], padded_length: int) -> None:
        self.rows = rows
        self.padded_length = padded_length
        self.num_computed = 0  # columns of the padded prompts

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.padded_length

    @property
    def wanted(self) -> bool:
        return any(row.wanted for row in self.rows)


class StaticScheduler:
    """One batch at a time, first come, first served."""

    def __init__(self, config: StaticConfig, kv: KVManager, max_model_len: int) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self._requests: dict[str, Request] = {}  # whose answers are not released
        self._waiting = WaitingQueue()
        self._batch: _Batch | None = None
        self._num_added = 0
        self._num_planned = 0

    @property
    def num_running(self) -> int:
        """Requests of the current batch whose answers are not released."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch."""
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        """None: what a batch needs is reserved before it begins."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request; refuses one that could never run to its end (see :class:`Scheduler`)."""
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request id {request.request_id!r} is already in use")
        set_longest(request, self.kv, self.max_model_len)
        request.rank = (0, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> SequenceDelta | None:
        """Ends a request. Its row stays in the batch and is computed for nobody, as long as there are others."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        elif self._batch is not None:
            for row in self._batch.rows:
                if row.request is request:
                    row.end()
            if not self.num_running:
                self._end_batch()
        request.status = Status.FINISHED_ABORT
        return SequenceDelta(request_id, finish_reason=FINISH_REASONS[request.status], timing=request.timing)

    def fail(self, request_id: str, error: str) -> SequenceDelta | None:
        """Ends a request that cannot go on; its row stays, as after :meth:`abort`. Nobody shares what it computed."""
        delta = self.abort(request_id)
        return None if delta is None else replace(delta, finish_reason="error", error=error)

    def plan(self, now: float) -> StepPlan:
        """The next slice of the prompts, or the next token of every row; or nothing, while a batch is filling."""
        admitted: list[str] = []
        if self._batch is None:
            oldest = self._waiting.peek().timing.arrival
            due = oldest + self.config.timeout
            if len(self._waiting) < self.config.batch_size and now < due:
                return StepPlan(self._num_planned, (), RowCounts(), wait_until=due)
            self._batch = self._fill_batch(now)
            admitted = [row.request.request_id for row in self._batch.rows]
        rows = RowCounts()
        chunks = self._prefill(self._batch, rows) if self._batch.prefilling else self._decode(self._batch, rows)
        plan = StepPlan(self._num_planned, chunks, rows, admitted=admitted)
        self._num_planned += 1
        return plan

    def _fill_batch(self, now: float) -> _Batch:
        """Takes those that waited longest: a full batch, or as many as the pool can hold reservations for."""
        candidates = [request for request, _ in zip(self._waiting, range(self.config.batch_size), strict=False)]
        while True:
            padded_length = max(request.num_prompt_tokens for request in candidates)
            most_new = max(request.max_tokens - request.num_prompt_tokens for request in candidates)
            lengths = [self._reservation(request, padded_length, most_new) for request in candidates]
            # One alone always fits: ``add`` has seen to it.
            if len(candidates) == 1 or sum(map(self.kv.blocks_for, lengths)) <= self.kv.num_blocks:
                break
            candidates.pop()
        rows = []
        for request, length in zip(candidates, lengths, strict=True):
            if not self.kv.allocate(request.request_id, length):
                raise AssertionError(f"no room for {request}, though no batch runs")
            self._waiting.remove(request)
            request.status = Status.RUNNING
            request.timing.admitted = now
            rows.append(_Row(request, length))
        return _Batch(rows, padded_length)

    def _reservation(self, request: Request, padded_length: int, most_new: int) -> int:
        """Tokens that must fit: the padded prompt, and what a row can generate; its last token is never computed."""
        return max(padded_length, min(self.max_model_len, request.num_prompt_tokens + most_new) - 1)

    def _prefill(self, batch: _Batch, rows: RowCounts) -> list[SequenceChunk]:
        """The next columns of all padded prompts. The slice that holds a prompt's last token samples its first."""
        start = batch.num_computed
        width = min(batch.padded_length - start, self.config.max_num_batched_tokens // len(batch.rows))
        chunks = []
        for row in batch.rows:
            request = row.request
            prompt = request.token_ids[start : min(start + width, request.num_prompt_tokens)]
            padding = width - len(prompt)
            end = start + len(prompt)
            samples = start < request.num_prompt_tokens == end < request.max_tokens
            chunks.append(
                SequenceChunk(
                    request.request_id,
                    [*prompt, *[PAD_TOKEN_ID] * padding],
                    start,
                    self.kv.table(request.request_id),
                    sampling=row.sampling if samples else None,
                    num_padding=padding,
                    context=request.context if samples else None,
                    prompt_targets=request.prompt_targets(start, end) if row.wanted else None,
                )
            )
            rows.padding += padding
            if row.wanted:
                request.count_rows(rows, start, len(prompt))
            else:
                rows.ended += len(prompt)
        return chunks

    def _decode(self, batch: _Batch, rows: RowCounts) -> list[SequenceChunk]:
        """One token for every row, ended or not. A row at the end of its reservation computes its last place again."""
        chunks = []
        for row in batch.rows:
            request = row.request
            chunks.append(
                SequenceChunk(
                    request.request_id,
                    [row.newest_token],
                    min(row.num_tokens, row.reserved) - 1,
                    self.kv.table(request.request_id),
                    sampling=row.sampling,
                    context=request.context,
                )
            )
            if row.wanted:
                rows.decode += 1
            else:
                rows.ended += 1
        return chunks

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDelta]:
        """Takes what the step computed; returns nothing until the batch ends, and then every answer whole."""
        batch = self._batch
        if batch is None:
            return []  # all were aborted while the step ran
        sampled = iter(result.sampled)
        for row, chunk in zip(batch.rows, plan.chunks, strict=True):
            if chunk.prompt_targets is not None:
                row.prompt_logprobs += row.request.take_prompt_logprobs(result)
            if chunk.sampling is not None:
                row.take(*next(sampled), now)
        if batch.prefilling:
            batch.num_computed += len(plan.chunks[0].token_ids)
            for row in batch.rows:
                if row.request.max_tokens <= min(batch.num_computed, row.request.num_prompt_tokens) and row.wanted:
                    row.request.status = Status.FINISHED_LENGTH
                    row.end()
        if batch.wanted:
            return []
        released = [self._release(row, now) for row in batch.rows if row.request.request_id in self._requests]
        self._end_batch()
        return released

    def _release(self, row: _Row, now: float) -> SequenceDelta:
        request = row.request
        request.timing.finished = now
        del self._requests[request.request_id]
        return SequenceDelta(
            request.request_id,
            tuple(request.token_ids[request.num_prompt_tokens :]),
            finish_reason=FINISH_REASONS[request.status],
            stop_reason=request.stop_reason(),
            timing=request.timing,
            logprobs=row.logprobs,
            prompt_logprobs=row.prompt_logprobs,
        )

    def _end_batch(self) -> None:
        assert self._batch is not None  # noqa: S101 - called only while a batch runs
        for row in self._batch.rows:
            self.kv.free(row.request.request_id)
        self._batch = None

    def check_integrity(self) -> None:
        """Proves that every request stands in exactly one place and that only the batch owns blocks."""
        self.kv.check_integrity()
        in_batch = self._batch.rows if self._batch is not None else []
        running = [row.request.request_id for row in in_batch if row.request.request_id in self._requests]
        waiting = [request.request_id for request in self._waiting]
        if sorted(running + waiting) != sorted(self._requests):
            raise AssertionError(f"running {running} and waiting {waiting} are not all of {sorted(self._requests)}")
        if self._batch is not None and not running:
            raise AssertionError("a batch runs that nobody waits for")
        if sum(self.kv.blocks_for(row.reserved) for row in in_batch) != self.kv.num_used_blocks:
            raise AssertionError(f"{self.kv.num_used_blocks} blocks are held, not what the batch reserved")
