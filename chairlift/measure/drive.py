"""Runs a workload on an engine in this process, and writes down what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from chairlift.engine.clock import Clock
from chairlift.engine.core import AddRequest, Command, EngineCore, StepOutput
from chairlift.engine.executor import Capacity, Executor
from chairlift.measure.records import RequestRecord, Run, SequenceWork, StepDetail
from chairlift.measure.workload import Workload, WorkloadRequest
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import SequenceChunk, SequenceDelta, StepPlan, StepRecord, StepResult
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.scheduling.scheduler import Scheduler


class MeasurementError(RuntimeError):
    """A run that cannot be counted, because a request of it failed."""


def run_workload(
    workload: Workload,
    scheduler: Scheduler,
    executor: Executor,
    clock: Clock,
    *,
    eos_token_ids: Collection[int] = (),
    sleep: Callable[[float], None] = time.sleep,
    on_finish: Callable[[], None] = lambda: None,
) -> Run:
    """Runs ``workload`` to its end. The executor stays open, so that the next policy runs on the same model.

    Greedy, with forced lengths. A client gets tokens when the scheduler hands them out: one by one from continuous
    batching, all at once from static batching, whose first token then comes with the last.

    Args:
        workload: what to run.
        scheduler: new, without requests.
        executor: computes the steps.
        clock: the time of the run; a simulation moves it by hand.
        eos_token_ids: of the model; they end nothing here, but are sampled like any other token.
        sleep: waits until the next arrival; with a virtual clock, its ``advance``.
        on_finish: called after each answer.

    Raises:
        MeasurementError: the engine refused a request.
    """
    return _Run(workload, scheduler, executor, clock, eos_token_ids, sleep, on_finish).run()


class _Run:
    """The clients, and the engine that they talk to."""

    def __init__(
        self,
        workload: Workload,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        eos_token_ids: Collection[int],
        sleep: Callable[[float], None],
        on_finish: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._on_finish = on_finish
        self._requests = {request.name: request for request in workload.requests}
        self._unsent: Iterator[WorkloadRequest] = iter(workload.requests)
        self._next: tuple[float, WorkloadRequest] | None = None  # of an open loop, with its time
        self._due: list[Command] = []
        self._sent: dict[str, float] = {}
        self._tokens: dict[str, list[float]] = {}
        self._records: list[RequestRecord] = []
        self._steps: list[StepDetail] = []
        self._recorder = StepRecorder(executor, scheduler.kv, {r.name: r.output_tokens for r in workload.requests})
        self._core = EngineCore(scheduler, self._recorder, clock, self._drain, eos_token_ids)
        self._clients = workload.clients

    def run(self) -> Run:
        """Every turn either computes a step, or sleeps until something is due: it ends when the workload does."""
        self._start = self._clock.now()
        if self._clients is None:
            self._advance()
        else:
            for _ in range(self._clients):
                self._send_next(self._start)
        while len(self._records) < len(self._requests):
            output = self._core.step()
            self._take(output)
            if output.record is None and not output.deltas:
                self._wait(output)
        return Run(self._records, self._steps, max(record.finished for record in self._records))

    def _wait(self, output: StepOutput) -> None:
        times = [self._next[0]] if self._next is not None else []
        if output.wait_until is not None:
            times.append(output.wait_until)
        if times:
            self._sleep(max(0.0, min(times) - self._clock.now()))

    # ---- sending ----

    def _drain(self) -> list[Command]:
        """What the engine reads as its inbox: all that is due by now."""
        while self._next is not None and self._next[0] <= self._clock.now():
            moment, request = self._next
            self._send(request, moment)
            self._advance()
        due, self._due = self._due, []
        return due

    def _advance(self) -> None:
        request = next(self._unsent, None)
        self._next = (self._start + request.arrival, request) if request is not None else None

    def _send_next(self, now: float) -> None:
        """A client of a closed loop sends its next request."""
        request = next(self._unsent, None)
        if request is not None:
            self._send(request, now)

    def _send(self, request: WorkloadRequest, moment: float) -> None:
        self._sent[request.name] = moment
        self._tokens[request.name] = []
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
        self._due.append(AddRequest(request.name, request.prompt_token_ids, params, arrival=moment))

    # ---- receiving ----

    def _take(self, output: StepOutput) -> None:
        now = self._clock.now()
        if output.record is not None:
            record = replace(output.record, time=output.record.time - self._start)
            self._steps.append(self._recorder.take(record))
        for delta in output.deltas:
            if delta.finish_reason == "error":
                raise MeasurementError(f"request {delta.request_id} was refused: {delta.error}")
            self._tokens[delta.request_id] += [now - self._start] * len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish(delta, now)
                if self._clients is not None:
                    self._send_next(now)

    def _finish(self, delta: SequenceDelta, now: float) -> None:
        name = delta.request_id
        started = delta.timing.admitted if delta.timing is not None else None
        self._records.append(
            RequestRecord(
                name,
                len(self._requests[name].prompt_token_ids),
                len(self._tokens[name]),
                self._sent[name] - self._start,
                self._tokens.pop(name),
                now - self._start,
                started=started - self._start if started is not None else None,
            )
        )
        self._on_finish()


class StepRecorder:
    """An executor that passes every step on to another and notes which sequences it was for.

    Args:
        executor: computes the steps.
        kv: of the scheduler whose plans come here.
        wanted: output tokens of each request, after which its rows are for nobody.
    """

    def __init__(self, executor: Executor, kv: KVManager, wanted: Mapping[str, int]) -> None:
        self._executor = executor
        self._kv = kv
        self._wanted = wanted
        self._sampled: dict[str, int] = {}
        self._computed: dict[str, int] = {}  # tokens in the cache, of requests that still need them
        self._last: _Note | None = None

    def capacity(self) -> Capacity:
        """The inner executor's."""
        return self._executor.capacity()

    def close(self) -> None:
        """Leaves the inner executor open: it is not this one's."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the step inside, then notes it."""
        result = self._executor.execute(plan)
        preempted = [event.request_id for event in plan.preempted]
        for name in preempted:
            self._computed.pop(name, None)
        work = [self._count(chunk) for chunk in plan.chunks]
        used = sum(self._computed.values())
        for item in work:
            self._sampled[item.name] += item.sampled
            if self._sampled[item.name] >= self._wanted[item.name]:
                self._computed.pop(item.name, None)
        reserved = self._kv.num_used_blocks * self._kv.block_size
        self._last = _Note(work, plan.admitted, preempted, reserved, used)
        return result

    def take(self, record: StepRecord) -> StepDetail:
        """Joins the note of the last step with the engine's record of it."""
        if self._last is None:
            raise AssertionError(f"step {record.step} is recorded but was not executed here")
        note, self._last = self._last, None
        return StepDetail(record, note.work, note.admitted, note.preempted, note.kv_reserved, note.kv_used)

    def _count(self, chunk: SequenceChunk) -> SequenceWork:
        name = chunk.request_id
        rows = len(chunk.token_ids)
        ended = self._sampled.setdefault(name, 0) >= self._wanted[name]
        if not ended and rows > chunk.num_padding:
            self._computed[name] = chunk.start + rows - chunk.num_padding
        return SequenceWork(name, rows, chunk.num_padding, chunk.sampling is not None, ended)


class _Note(NamedTuple):
    """What :class:`StepDetail` holds beside the engine's record."""

    work: Sequence[SequenceWork]
    admitted: Sequence[str]
    preempted: Sequence[str]
    kv_reserved: int
    kv_used: int
