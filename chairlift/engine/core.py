"""The engine's loop: drain inbox, plan, execute, drain aborts, commit, publish."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chairlift.engine.clock import Clock
from chairlift.engine.executor import Executor
from chairlift.engine.records import StepLog
from chairlift.scheduling.plan import Preemption, SequenceDelta, StepPlan, StepRecord, StepResult
from chairlift.scheduling.request import Request
from chairlift.scheduling.sampling_params import SamplingParams, StructuredSpec
from chairlift.scheduling.scheduler import Scheduler
from chairlift.scheduling.work import step_work

logger = logging.getLogger(__name__)

GUIDE_POLL_SECONDS = 0.005
"""How often an engine without other work looks whether the form of an answer has been compiled."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A command: run this sequence. ``arrival`` is when it was sent, by the engine's clock."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """A command: end this sequence, in whatever state it is. Unknown ids are passed over: it may just have ended."""

    request_id: str


Command = AddRequest | AbortRequest


@dataclass(slots=True)
class StepOutput:
    """What one turn of the loop has to tell.

    Attributes:
        deltas: new tokens, and ends.
        record: of the step, if one was executed.
        running, waiting, swapped: requests in each state after this turn.
        blocks_used: KV blocks that requests own after this turn.
        wait_until: nothing was executed, and until this time only a command could change that.
    """

    deltas: list[SequenceDelta] = field(default_factory=list)
    record: StepRecord | None = None
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    blocks_used: int = 0
    wait_until: float | None = None


class Guide(Protocol):
    """Knows which tokens may come next where an answer must have a form. It is the loop's, and no executor's or
    scheduler's: a plan carries the masks that it needs, and preemption changes nothing of what was accepted.

    Whatever is wrong with one request is raised as a :class:`ValueError`, and ends that request alone.
    """

    def begin(self, request_id: str, spec: StructuredSpec) -> None:
        """Takes a new request."""
        ...

    def ready(self, request_id: str) -> bool:
        """Whether it can be asked for masks; until then the request is not given to the scheduler."""
        ...

    def mask(self, request_id: str) -> bytes | bytearray | memoryview | None:
        """The tokens that may come next, as :attr:`SequenceChunk.allowed` has them; ``None`` for all.

        Once the form is complete these are the end-of-sequence tokens. What is returned must stay as it is
        until the step is computed, so each request needs memory of its own.
        """
        ...

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Is told the tokens that came, each one of those allowed."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, in whatever way, or never began."""
        ...


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if the parameters name a token that the model does not have."""
    for field_name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{field_name} names token {token_id}; the model's are from 0 to {vocab_size - 1}")


class EngineCore:
    """One scheduler, one executor, and the thread that owns them both.

    Commands reach it through ``drain``, which is called between steps and once more between a step's execution and its
    commit: whoever hangs up while a step runs is gone before that step's tokens are handed out, and its blocks are free
    for the next plan. Nothing else ever touches the scheduler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        drain: Callable[[], Sequence[Command]],
        eos_token_ids: Collection[int] = (),
        step_log: StepLog | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self._drain = drain
        self._eos_token_ids = frozenset(eos_token_ids)
        capacity = executor.capacity()
        self._vocab_size = capacity.vocab_size
        self._block_bytes = capacity.block_size * capacity.kv_bytes_per_token
        self.step_log = StepLog() if step_log is None else step_log
        self._guide = guide
        self._guided: set[str] = set()
        self._unready: dict[str, AddRequest] = {}  # those that the guide is not ready for

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work or bool(self._unready)

    def step(self) -> StepOutput:
        """Runs the loop once; without work it only takes commands."""
        output = StepOutput()
        self.take_commands(output)
        if self.scheduler.has_work:
            self._run_step(output)
        elif self._unready:
            output.wait_until = self.clock.now() + GUIDE_POLL_SECONDS
        output.running = self.scheduler.num_running
        output.waiting = self.scheduler.num_waiting + len(self._unready)
        output.swapped = self.scheduler.num_swapped
        output.blocks_used = self.scheduler.kv.num_used_blocks
        return output

    def _run_step(self, output: StepOutput) -> None:
        started = self.clock.now()
        plan = self.scheduler.plan(started)
        if plan.empty:
            if plan.wait_until is None:
                raise RuntimeError(f"nothing to do in step {plan.step} though there is work: the scheduler is stuck")
            output.wait_until = plan.wait_until
            return
        for event in plan.preempted:
            _log_preemption(event, self._block_bytes)
        if self._guided:
            plan = self._with_masks(plan, output)
        result = self.executor.execute(plan)
        self.clock.advance(result.elapsed)
        self._end_failed(result, output)  # before an abort does, which would leave what they computed to be found
        self.take_commands(output)
        committed = self.scheduler.commit(plan, result, self.clock.now())
        output.deltas.extend(committed)
        if self._guided:
            self._tell_guide(plan, result, committed, output)
        output.record = self._record(plan, started, result.elapsed, committed)
        self.step_log.add(output.record)

    def close(self) -> None:
        """Frees the device and completes the step log."""
        self.executor.close()
        self.step_log.close()

    def take_commands(self, output: StepOutput) -> None:
        """Takes what has come in; refusals and ends of aborted requests go to ``output``."""
        for command in self._drain():
            if isinstance(command, AddRequest):
                self._add(command, output)
            else:
                self._abort(command, output)
        if self._unready and self._guide is not None:
            for request_id in [request_id for request_id in self._unready if self._guide.ready(request_id)]:
                self._schedule(self._unready.pop(request_id), output)

    def _add(self, command: AddRequest, output: StepOutput) -> None:
        try:
            self._begin_guiding(command)
        except ValueError as refusal:
            self._refuse(command, refusal, output)
            return
        if command.request_id in self._guided:
            self._unready[command.request_id] = command
        else:
            self._schedule(command, output)

    def _schedule(self, command: AddRequest, output: StepOutput) -> None:
        try:
            check_vocabulary(command.params, self._vocab_size)
            self.scheduler.add(
                Request(
                    command.request_id,
                    command.prompt_token_ids,
                    command.params,
                    eos_token_ids=self._eos_token_ids,
                    arrival=command.arrival,
                    priority=command.priority,
                    cache_salt=command.cache_salt,
                )
            )
        except ValueError as refusal:  # of whatever kind: a request that cannot be must not end all the others
            self._refuse(command, refusal, output)

    def _refuse(self, command: AddRequest, refusal: ValueError, output: StepOutput) -> None:
        self._forget_guided(command.request_id)
        output.deltas.append(SequenceDelta(command.request_id, finish_reason="error", error=str(refusal)))

    def _abort(self, command: AbortRequest, output: StepOutput) -> None:
        self._forget_guided(command.request_id)
        if self._unready.pop(command.request_id, None) is not None:
            output.deltas.append(SequenceDelta(command.request_id, finish_reason="abort"))
            return
        delta = self.scheduler.abort(command.request_id)
        if delta is not None:
            output.deltas.append(delta)

    def _end_failed(self, result: StepResult, output: StepOutput) -> None:
        """Ends those that the executor could not go on with, and nobody else."""
        for request_id, reason in result.failed.items():
            self._fail(request_id, reason, output)

    def _fail(self, request_id: str, reason: str, output: StepOutput) -> None:
        self._forget_guided(request_id)
        delta = self.scheduler.fail(request_id, reason)
        if delta is not None:
            logger.error("ended request %s: %s", request_id, reason)
            output.deltas.append(delta)

    # ---- answers that must have a form ----

    def _begin_guiding(self, command: AddRequest) -> None:
        spec = command.params.structured
        if spec is None:
            return
        if self._guide is None:
            raise ValueError("this engine has nothing to give an answer a form with")
        self._guided.add(command.request_id)
        self._guide.begin(command.request_id, spec)

    def _with_masks(self, plan: StepPlan, output: StepOutput) -> StepPlan:
        """The plan, with the tokens that each of the guided may be given next."""
        assert self._guide is not None  # noqa: S101 - only it guides
        chunks = list(plan.chunks)
        for index, chunk in enumerate(chunks):
            if chunk.sampling is not None and chunk.sampling.structured and chunk.request_id in self._guided:
                try:
                    chunks[index] = replace(chunk, allowed=self._guide.mask(chunk.request_id))
                except ValueError as error:
                    self._fail(chunk.request_id, str(error), output)
        return replace(plan, chunks=chunks)

    def _tell_guide(
        self, plan: StepPlan, result: StepResult, committed: Sequence[SequenceDelta], output: StepOutput
    ) -> None:
        """What came in this step, of those that go on."""
        assert self._guide is not None  # noqa: S101 - only it guides
        for delta in committed:
            if delta.finish_reason is not None:
                self._forget_guided(delta.request_id)
        sampling = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        for chunk, token_id in zip(sampling, result.token_ids, strict=True):
            if chunk.request_id in self._guided and chunk.sampling is not None and chunk.sampling.structured:
                try:
                    self._guide.accept(chunk.request_id, (token_id,))
                except ValueError as error:
                    self._fail(chunk.request_id, str(error), output)

    def _forget_guided(self, request_id: str) -> None:
        if self._guide is not None and request_id in self._guided:
            self._guided.remove(request_id)
            self._guide.forget(request_id)

    def _record(self, plan: StepPlan, started: float, elapsed: float, committed: Sequence[SequenceDelta]) -> StepRecord:
        work = step_work(plan)
        return StepRecord(
            step=plan.step,
            time=started,
            elapsed=elapsed,
            rows=plan.rows,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            swapped=self.scheduler.num_swapped,
            blocks_used=self.scheduler.kv.num_used_blocks,
            blocks_total=self.scheduler.kv.num_blocks,
            admitted=len(plan.admitted),
            finished=sum(delta.finish_reason is not None for delta in committed),
            preempted=len(plan.preempted),
            blocks_swapped_out=len(plan.swap_out),
            blocks_swapped_in=len(plan.swap_in),
            sequences=work.sequences,
            sampled=work.sampled,
            context=work.context,
            pairs=work.pairs,
            cached_tokens=plan.num_cached_tokens,
            looked_up_tokens=plan.num_looked_up_tokens,
        )


def _log_preemption(event: Preemption, block_bytes: int) -> None:
    reason = f"request {event.wanted_by} needed a KV block and none was free"
    if event.swapped:
        done = f"swapped out: {event.num_blocks} blocks, {event.num_blocks * block_bytes:,} bytes moved"
    else:
        done = f"to be recomputed: {event.num_tokens} tokens lost{', the host is full' if event.host_full else ''}"
    logger.info("preempted request %s (%s): %s", event.request_id, done, reason)
