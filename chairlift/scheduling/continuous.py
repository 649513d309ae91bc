"""Continuous batching: the batch is decided anew at every step.

This is the iteration-level scheduling of Orca (Yu et al., OSDI 2022). A sequence that ends leaves its place to the next
one in the very next step, and nobody waits for the longest. Long prompts are computed in chunks beside the decoding of
others (Agrawal et al., Sarathi-Serve, OSDI 2024), and keys and values live in blocks that any sequence can use (Kwon et
al., vLLM, SOSP 2023).

Why every request ends. Running requests stand in order of arrival, and one gives way only to one before it. So the
first of them is put aside by nobody, unless it runs alone, and alone it always fits, or ``add`` would have refused it.
Each step computes at least one token of the first (its share of the budget is kept, see
:meth:`ContinuousScheduler._continue_running`), so it ends after finitely many steps, and then the next one is first.
While a request waits at the head of the queue nobody is admitted past it, so those that run become fewer until it fits;
then the same holds for it.
"""

from __future__ import annotations

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import RowCounts, SequenceChunk, SequenceDelta, StepPlan, StepResult
from chairlift.scheduling.queue import FCFSQueue
from chairlift.scheduling.request import FINISH_REASONS, Request, Status
from chairlift.scheduling.scheduler import RequestRefusedError, set_longest


class _Draft:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[SequenceChunk] = []
        self.rows = RowCounts()
        self.admitted: list[str] = []
        self.preempted: list[str] = []


class ContinuousScheduler:
    """First come, first served, with a token budget for each step and preemption by recomputation."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_model_len: int) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # in order of arrival
        self._waiting = FCFSQueue()
        self._num_added = 0
        self._num_planned = 0

    @property
    def num_running(self) -> int:
        """Requests that own blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that own none."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request; refuses one that could never run to its end (see :class:`Scheduler`)."""
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request id {request.request_id!r} is already in use")
        set_longest(request, self.kv, self.max_model_len)
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> SequenceDelta | None:
        """Ends a request in whatever state it is; see :class:`Scheduler`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.status = Status.FINISHED_ABORT
        self._forget(request)
        return SequenceDelta(request_id, finish_reason=FINISH_REASONS[request.status], timing=request.timing)

    def plan(self, now: float) -> StepPlan:
        """Running requests first, decode before prefill; then, unless memory ran out just now, the waiting."""
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft, now)
        plan = StepPlan(self._num_planned, draft.chunks, draft.rows, admitted=draft.admitted, preempted=draft.preempted)
        self._num_planned += 1
        return plan

    def _continue_running(self, draft: _Draft) -> None:
        """Decode never waits for prefill: the budget covers a token for every running request, and they take it first.

        Whoever needs a block that is not there takes one from the last in order, which therefore has no chunk in this
        draft yet: nothing has to be given back.
        """
        prefilling = []
        for request in list(self._running):
            if request.status is not Status.RUNNING:
                continue
            if not request.decoding:
                prefilling.append(request)
            elif self._make_room(request, draft):
                self._schedule(request, draft)
        for request in prefilling:
            # Its blocks were all allocated when it was admitted; it may have lost them to a decode above.
            if request.status is Status.RUNNING and draft.budget:
                self._schedule(request, draft)

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """Gets ``request`` the block for its newest token, if need be from those that came after it."""
        while not self.kv.allocate(request.request_id, request.num_tokens):
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        self._running.remove(victim)
        self.kv.free(victim.request_id)
        victim.num_computed_tokens = 0
        victim.status = Status.PREEMPTED
        victim.timing.preemptions += 1
        self._waiting.push_back(victim)
        draft.preempted.append(victim.request_id)

    def _admit_waiting(self, draft: _Draft, now: float) -> None:
        """Admits in order, while there is budget, a place, and room for the whole of what the next one has so far.

        Room for its next chunk would not be enough: it would be put aside half way, again and again.
        """
        while self._waiting and draft.budget and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            if not self.kv.allocate(request.request_id, request.num_tokens):
                return
            self._waiting.pop()
            request.status = Status.RUNNING
            if request.timing.admitted is None:
                request.timing.admitted = now
            self._running.append(request)
            draft.admitted.append(request.request_id)
            self._schedule(request, draft)

    def _schedule(self, request: Request, draft: _Draft) -> None:
        start = request.num_computed_tokens
        count = min(request.num_missing_tokens, draft.budget)
        draft.budget -= count
        draft.chunks.append(
            SequenceChunk(
                request.request_id,
                request.token_ids[start : start + count],
                start,
                self.kv.table(request.request_id),
                sampling=request.params if start + count == request.num_tokens else None,
            )
        )
        request.count_rows(draft.rows, start, count)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDelta]:
        """Takes what the step computed; see :class:`Scheduler`."""
        expected = sum(chunk.sampling is not None for chunk in plan.chunks)
        if len(result.token_ids) != expected:
            raise AssertionError(f"step {plan.step} should have sampled {expected} tokens, not {len(result.token_ids)}")
        sampled = iter(result.token_ids)
        deltas = []
        for chunk in plan.chunks:
            token_id = next(sampled) if chunk.sampling is not None else None
            request = self._requests.get(chunk.request_id)
            if request is None:
                continue  # aborted while the step ran
            request.mark_computed(chunk.start + len(chunk.token_ids))
            if token_id is not None:
                deltas.append(self._take_token(request, token_id, now))
        return deltas

    def _take_token(self, request: Request, token_id: int, now: float) -> SequenceDelta:
        if request.timing.first_token is None:
            request.timing.first_token = now
        if not request.append(token_id):
            return SequenceDelta(request.request_id, (token_id,))
        request.timing.finished = now
        self._running.remove(request)
        self._forget(request)
        return SequenceDelta(
            request.request_id,
            (token_id,),
            finish_reason=FINISH_REASONS[request.status],
            stop_reason=request.stop_reason(),
            timing=request.timing,
        )

    def _forget(self, request: Request) -> None:
        self.kv.free(request.request_id)
        del self._requests[request.request_id]

    def check_integrity(self) -> None:
        """Proves that every request stands in exactly one place and that the blocks are accounted for."""
        self.kv.check_integrity()
        running = [r.request_id for r in self._running]
        waiting = [r.request_id for r in self._waiting]
        if sorted(running + waiting) != sorted(self._requests):
            raise AssertionError(
                f"running {running} and waiting {waiting} are not the requests {sorted(self._requests)}"
            )
        for queue in (self._running, list(self._waiting)):
            orders = [r.order for r in queue]
            if orders != sorted(orders):
                raise AssertionError(f"requests out of order: {queue}")
        for request in self._running:
            if request.status is not Status.RUNNING or request.num_missing_tokens < 1:
                raise AssertionError(f"{request} is among the running")
            if len(self.kv.table(request.request_id)) < self.kv.blocks_for(request.num_computed_tokens):
                raise AssertionError(f"{request} has more computed than its blocks can hold")
        for request in self._waiting:
            if request.status not in (Status.WAITING, Status.PREEMPTED) or request.num_computed_tokens:
                raise AssertionError(f"{request} is among the waiting")
            if self.kv.has_table(request.request_id):
                raise AssertionError(f"{request} waits but owns blocks")
