"""Continuous batching: the batch is decided anew at every step.

This is the iteration-level scheduling of Orca (Yu et al., OSDI 2022). A sequence that ends leaves its place to the next
one in the very next step, and nobody waits for the longest. Long prompts are computed in chunks beside the decoding of
others (Agrawal et al., Sarathi-Serve, OSDI 2024), and keys and values live in blocks that any sequence can use (Kwon et
al., vLLM, SOSP 2023).

Why every request ends. All requests, running or not, stand in one order: by rank. One gives way only to one before it.
So the first of the running is put aside by nobody, unless it runs alone, and alone it always fits, or ``add`` would
have refused it. Each step computes at least one token of it: the budget covers a token for every running request. So it
ends after finitely many steps, and then the next one is first. While a request waits at the head of the queue nobody is
admitted past it, so those that run become fewer until it fits; then the same holds for it. Whether one is put aside by
swapping or by recomputation makes no difference to this: on the host or not, all wait in one queue. (Under the
"priority" policy a class can wait for as long as better ones keep coming; that is what was asked for.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import (
    Preemption,
    RowCounts,
    SequenceChunk,
    SequenceDelta,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from chairlift.scheduling.preemption import OutputLengths, choose_victim, prefers_swap
from chairlift.scheduling.queue import WaitingQueue
from chairlift.scheduling.request import FINISH_REASONS, Request, Status
from chairlift.scheduling.scheduler import RequestRefusedError, set_longest


class _Draft:
    """A step in the making: how many tokens of whom, and what has to happen before."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.counts: dict[Request, int] = {}
        self.num_partial = 0  # prompts that this step leaves unfinished, as far as it is made
        self.held_back = False  # whether somebody was not admitted because of those
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.admitted: list[str] = []
        self.preempted: list[Preemption] = []
        self.num_cached_tokens = 0
        self.num_looked_up_tokens = 0

    def take(self, request: Request, most: int) -> None:
        """Plans what ``request`` lacks, as far as ``most`` and the budget allow."""
        count = min(request.num_missing_tokens, most, self.budget)
        self.counts[request] = count
        self.budget -= count
        self.num_partial += count < request.num_missing_tokens

    def spend_rest(self) -> None:
        """Gives what is left of the budget to those that wanted more, in order. If some is left, all have enough."""
        if not self.num_partial:
            return
        for request, count in self.counts.items():
            if not self.budget:
                return
            more = min(request.num_missing_tokens - count, self.budget)
            self.counts[request] = count + more
            self.budget -= more
        if self.budget:
            self.num_partial = 0


class ContinuousScheduler:
    """Decides every step anew, under a token budget, and puts requests aside when memory runs out."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_model_len: int) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # in order of rank
        self._waiting = WaitingQueue()
        self._moved: list[Request] = []  # between host and device, by a plan that is not committed yet
        self._output_lengths = OutputLengths()
        self._num_swapped = 0
        self._num_added = 0
        self._num_planned = 0

    @property
    def num_running(self) -> int:
        """Requests that own blocks on the device."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that own none anywhere."""
        return len(self._waiting) - self._num_swapped

    @property
    def num_swapped(self) -> int:
        """Requests that own blocks on the host."""
        return self._num_swapped

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request; refuses one that could never run to its end (see :class:`Scheduler`)."""
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request id {request.request_id!r} is already in use")
        set_longest(request, self.kv, self.max_model_len)
        request.rank = (request.priority if self.config.policy == "priority" else 0, self._num_added)
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
            self._num_swapped -= request.status is Status.SWAPPED
        request.status = Status.FINISHED_ABORT
        self._forget(request)
        return SequenceDelta(request_id, finish_reason=FINISH_REASONS[request.status], timing=request.timing)

    def fail(self, request_id: str, error: str) -> SequenceDelta | None:
        """Ends a request that cannot go on; see :class:`Scheduler`."""
        request = self._requests.get(request_id)
        if request is not None:
            self.kv.forget_prefix(request)
        delta = self.abort(request_id)
        return None if delta is None else replace(delta, finish_reason="error", error=error)

    # ---- plan ----

    def plan(self, now: float) -> StepPlan:
        """Running requests first, decode before prefill; then, unless memory ran out just now, those that wait."""
        self._settle_moves()
        draft = _Draft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft, now)
        draft.spend_rest()
        # With a threshold the rest may have completed the prompts that held others back. Each turn but the last admits
        # one of those.
        while draft.held_back and draft.budget:
            self._admit_waiting(draft, now)
            draft.spend_rest()
        plan = self._write_plan(draft)
        self._num_planned += 1
        return plan

    def _continue_running(self, draft: _Draft) -> None:
        """Decode never waits for prefill: the budget covers a token for every running request, and they take it first.

        Whoever needs a block that is not there takes it from somebody behind it in rank, who therefore has no tokens in
        this draft yet: nothing has to be given back.
        """
        prefilling = []
        block_size = self.kv.block_size
        counts = draft.counts
        for request in list(self._running):
            if request.status is not Status.RUNNING:
                continue  # gave way to one before it
            if not request.decoding:
                prefilling.append(request)
            elif request.num_computed_tokens % block_size or self._make_room(request, draft):
                # Most tokens go to a block that the one before them has reached: nothing to ask for.
                counts[request] = 1
        draft.budget -= len(counts)
        for request in prefilling:  # with all the blocks that they need, since they were admitted
            if draft.budget:
                draft.take(request, self._most_prefill(request))

    def _most_prefill(self, request: Request) -> int:
        """Rows that a prompt may take before others have had theirs. What they leave over it gets as well."""
        threshold = self.config.long_prefill_token_threshold
        if threshold is not None:
            return threshold
        budget = self.config.max_num_batched_tokens
        return budget if request.num_missing_tokens <= budget else max(1, budget // 2)

    def _make_room(self, request: Request, draft: _Draft) -> bool:
        """Gets ``request`` the block for its newest token, if need be from those behind it."""
        while not self.kv.allocate(request.request_id, request.num_tokens):
            victim = choose_victim(self._running, request, self.config.victim_rule)
            self._preempt(victim, request, draft)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, requester: Request, draft: _Draft) -> None:
        num_computed = victim.num_computed_tokens
        wants_swap = num_computed > 0 and prefers_swap(victim, self.kv, self.config)
        pairs = self.kv.swap_out(victim) if wants_swap else None
        if pairs is not None:
            draft.swap_out.extend(pairs)
            victim.status = Status.SWAPPED
            self._num_swapped += 1
            self._moved.append(victim)
        else:
            self.kv.free(victim.request_id)
            victim.num_computed_tokens = 0
            victim.status = Status.PREEMPTED
        victim.timing.preemptions += 1
        self._running.remove(victim)
        self._waiting.push(victim)
        draft.preempted.append(
            Preemption(
                victim.request_id,
                requester.request_id,
                swapped=pairs is not None,
                num_tokens=num_computed,
                num_blocks=len(pairs or ()),
                host_full=wants_swap and pairs is None,
            )
        )

    def _admit_waiting(self, draft: _Draft, now: float) -> None:
        """Admits in order of rank, while there is budget, a place, and room for all that the next one has so far.

        Room for its next chunk would not be enough: it would be put aside half way, again and again. Those that were
        put aside have kept their rank, and so come before all that came later.
        """
        reserving = self.config.admission_reserve
        reserve: int | None = None
        while self._waiting and draft.budget and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            at_once = min(draft.budget, self._most_prefill(request))
            crowded = draft.num_partial >= self.config.max_num_partial_prefills
            draft.held_back = crowded and request.num_missing_tokens > at_once
            if draft.held_back:
                return
            growth = self._growth(request) if reserving else 0
            if reserve is None:
                reserve = self._expected_growth() if reserving else 0
            # Whoever runs alone needs none: the whole pool is its own.
            if not self._give_blocks(request, reserve + growth if self._running else 0, draft):
                return
            reserve += growth
            self._waiting.pop()
            request.status = Status.RUNNING
            if request.timing.admitted is None:
                request.timing.admitted = now
                request.timing.cached_tokens = request.num_computed_tokens
            insort(self._running, request, key=lambda r: r.rank)
            draft.admitted.append(request.request_id)
            draft.take(request, self._most_prefill(request))

    def _give_blocks(self, request: Request, spare: int, draft: _Draft) -> bool:
        """Makes room for a waiting request, with what is computed of it already; leaves ``spare`` blocks over."""
        if request.status is Status.SWAPPED:
            pairs = self.kv.swap_in(request, spare)
            if pairs is None:
                return False
            draft.swap_in.extend(pairs)
            self._num_swapped -= 1
            self._moved.append(request)
            return True
        cached = self.kv.admit(request, spare)
        if cached is None:
            return False
        request.num_computed_tokens = cached
        draft.num_cached_tokens += cached
        draft.num_looked_up_tokens += request.num_tokens
        return True

    def _growth(self, request: Request) -> int:
        """Blocks that the request is expected to need beyond those it has, or gets when it is admitted."""
        grown = self.kv.blocks_for(request.num_tokens + self._output_lengths.expected_rest(request))
        return grown - self.kv.blocks_for(request.num_tokens)

    def _expected_growth(self) -> int:
        return sum(self._growth(request) for request in self._running)

    def _settle_moves(self) -> None:
        """A step that failed may have moved nothing, or half: what it should have moved is computed again."""
        for request in self._moved:
            if request.status is Status.SWAPPED:
                self.kv.free(request.request_id)
                self._num_swapped -= 1
                request.status = Status.PREEMPTED
            if not request.status.finished:
                request.num_computed_tokens = 0
        self._moved.clear()

    def _write_plan(self, draft: _Draft) -> StepPlan:
        rows = RowCounts()
        chunks = []
        table = self.kv.table
        for request, count in draft.counts.items():
            start = request.num_computed_tokens
            end = start + count
            request.count_rows(rows, start, count)
            token_ids = request.token_ids
            samples = end == len(token_ids) < request.max_tokens
            chunks.append(
                SequenceChunk(
                    request.request_id,
                    token_ids[start:end],
                    start,
                    table(request.request_id),
                    request.params if samples else None,
                    0,  # no padding
                    request.context if samples else None,
                    request.prompt_targets(start, end) if request.wants_prompt_logprobs else None,
                )
            )
        return StepPlan(
            self._num_planned,
            chunks,
            rows,
            swap_out=draft.swap_out,
            swap_in=draft.swap_in,
            admitted=draft.admitted,
            preempted=draft.preempted,
            num_cached_tokens=draft.num_cached_tokens,
            num_looked_up_tokens=draft.num_looked_up_tokens,
        )

    # ---- commit ----

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDelta]:
        """Takes what the step computed; see :class:`Scheduler`."""
        expected = sum(chunk.sampling is not None for chunk in plan.chunks)
        if len(result.token_ids) != expected:
            raise AssertionError(f"step {plan.step} should have sampled {expected} tokens, not {len(result.token_ids)}")
        self._moved.clear()
        sampled = iter(result.sampled)
        deltas = []
        find, register, take = self._requests.get, self.kv.register, self._take_token
        for chunk in plan.chunks:
            token = next(sampled) if chunk.sampling is not None else None
            request = find(chunk.request_id)
            if request is None:
                continue  # aborted while the step ran
            start = chunk.start
            request.mark_computed(start + len(chunk.token_ids))
            register(request, start)
            told = request.take_prompt_logprobs(result) if chunk.prompt_targets is not None else ()
            if token is not None:
                deltas.append(take(request, token[0], token[1], told, now))
            elif request.complete_without_tokens():
                deltas.append(self._end(request, (), (), told, now))
            elif told:
                deltas.append(SequenceDelta(request.request_id, prompt_logprobs=told))
        return deltas

    def _take_token(
        self,
        request: Request,
        token_id: int,
        logprob: TokenLogprob | None,
        told: Sequence[TokenLogprob],
        now: float,
    ) -> SequenceDelta:
        first = request.timing.first_token is None
        if first:
            request.timing.first_token = now
        logprobs = () if logprob is None else (logprob,)
        if request.append(token_id):
            self._output_lengths.add(request.num_tokens - request.num_prompt_tokens)
            return self._end(request, (token_id,), logprobs, told, now)
        timing = request.timing if first else None
        return SequenceDelta(request.request_id, (token_id,), None, None, None, timing, logprobs, told)

    def _end(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        told: Sequence[TokenLogprob],
        now: float,
    ) -> SequenceDelta:
        request.timing.finished = now
        self._running.remove(request)
        self._forget(request)
        return SequenceDelta(
            request.request_id,
            token_ids,
            finish_reason=FINISH_REASONS[request.status],
            stop_reason=request.stop_reason(),
            timing=request.timing,
            logprobs=logprobs,
            prompt_logprobs=told,
        )

    def _forget(self, request: Request) -> None:
        self.kv.free(request.request_id)
        del self._requests[request.request_id]

    def check_integrity(self) -> None:
        """Proves that every request stands in exactly one place and that the blocks are accounted for."""
        self.kv.check_integrity()
        waiting = list(self._waiting)
        names = sorted(request.request_id for request in (*self._running, *waiting))
        if names != sorted(self._requests):
            raise AssertionError(f"running and waiting are {names}, not the requests {sorted(self._requests)}")
        if [r.rank for r in self._running] != sorted(r.rank for r in self._running):
            raise AssertionError(f"running requests out of order: {self._running}")
        for request in self._running:
            if request.status is not Status.RUNNING or request.num_missing_tokens < 1:
                raise AssertionError(f"{request} is among the running")
            if len(self.kv.table(request.request_id)) < self.kv.blocks_for(request.num_computed_tokens):
                raise AssertionError(f"{request} has more computed than its blocks can hold")
        for request in waiting:
            if request.status is not Status.SWAPPED and request.num_computed_tokens:
                raise AssertionError(f"{request} waits and owns no blocks, but counts tokens as computed")
            if request.status >= Status.RUNNING or self.kv.has_table(request.request_id):
                raise AssertionError(f"{request} waits but owns blocks on the device")
        if self._num_swapped != sum(request.status is Status.SWAPPED for request in waiting):
            raise AssertionError(f"{self._num_swapped} requests are counted as swapped, but not as many are")
