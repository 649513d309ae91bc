"""Replicas under a virtual clock, and the router before them: a discrete-event simulation.

Each replica is the engine's own core with the engine's own scheduler; only its executor is simulated. Every replica has
a clock of its own, and the one whose next event is earliest goes first, so that a router sees the others as they are at
that moment. A request that arrives while a step runs is taken when the step ends, as in a real engine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from chairlift.config import EngineConfig
from chairlift.engine.build import build_scheduler
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import AddRequest, Command, EngineCore, StepOutput
from chairlift.engine.executor import Capacity
from chairlift.engine.records import StepLog
from chairlift.measure.drive import StepRecorder
from chairlift.measure.metrics import Metrics
from chairlift.measure.records import RequestRecord, Run, StepDetail
from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.routing import Router, make_router
from chairlift.scheduling.sampling_params import SamplingParams
from chairlift.simulate.cost import StepCost
from chairlift.simulate.executor import SimulatedExecutor


class Replica:
    """One engine, its clock, and its inbox."""

    def __init__(self, config: EngineConfig, capacity: Capacity, cost: StepCost, workload: Workload | None) -> None:
        self.clock = VirtualClock()
        self.load = 0  # tokens that requests sent here may still need
        self._inbox: list[Command] = []
        scheduler = build_scheduler(config, capacity)
        executor = SimulatedExecutor(capacity, cost)
        self.recorder: StepRecorder | None = None
        if workload is not None:
            self.recorder = StepRecorder(executor, scheduler.kv, {r.name: r.output_tokens for r in workload.requests})
        self.core = EngineCore(
            scheduler, self.recorder or executor, self.clock, self._drain, step_log=StepLog(ring_size=1)
        )
        self.steps: list[StepDetail] = []
        self.records: list[StepRecord] = []
        self._waits_until: float | None = None

    def _drain(self) -> Sequence[Command]:
        due, self._inbox = self._inbox, []
        return due

    def send(self, command: AddRequest) -> None:
        """Puts a request into the inbox; an idle replica wakes up at its arrival."""
        self._inbox.append(command)
        if not self.core.has_work or self._waits_until is not None:
            self.clock.advance(max(0.0, command.arrival - self.clock.now()))
        self._waits_until = None

    @property
    def next_event(self) -> float | None:
        """When it will do something; ``None`` while it is idle."""
        if self._waits_until is not None:
            return self._waits_until
        return self.clock.now() if self._inbox or self.core.has_work else None

    def step(self) -> StepOutput:
        """Does it."""
        if self._waits_until is not None:
            self.clock.advance(max(0.0, self._waits_until - self.clock.now()))
            self._waits_until = None
        output = self.core.step()
        if output.record is not None:
            self.records.append(output.record)
            if self.recorder is not None:
                self.steps.append(self.recorder.take(output.record))
        elif self.core.has_work:
            self._waits_until = output.wait_until
        return output


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation leaves behind.

    Attributes:
        requests: in the order in which they ended, of all replicas.
        records: the steps of each replica.
        details: the same with their sequences, where they were asked for.
        duration: virtual seconds until the last request ended.
        aborted: whether it was given up before its end.
    """

    requests: Sequence[RequestRecord]
    records: Sequence[Sequence[StepRecord]]
    details: Sequence[Sequence[StepDetail]]
    duration: float
    aborted: bool = False

    def first_run(self) -> Run:
        """All requests with the steps of the first replica: what a picture can show."""
        return Run(self.requests, self.details[0], self.duration)


class Fleet:
    """Replicas behind a router.

    Args:
        config: how each schedules.
        capacity: what each holds.
        cost: how long a step takes.
        replicas: how many.
        routing: one of :data:`~chairlift.scheduling.routing.ROUTES`.
        detail: keep what each step computed for each sequence, which pictures need and long simulations do not.
        give_up: called with each ended request; returning ``True`` ends the simulation there.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        cost: StepCost,
        *,
        replicas: int = 1,
        routing: str = "least-load",
        detail: bool = False,
        give_up: Callable[[RequestRecord], bool] = lambda _: False,
    ) -> None:
        if replicas < 1:
            raise WorkloadError(f"--replicas must be at least 1, got {replicas}")
        self._config, self._capacity, self._cost = config, capacity, cost
        self._detail = detail
        self._count = replicas
        self._routing = routing
        self._give_up = give_up

    def run(self, workload: Workload) -> Outcome:
        """Simulates the workload to its end."""
        detailed = workload if self._detail else None
        replicas = [Replica(self._config, self._capacity, self._cost, detailed) for _ in range(self._count)]
        return _Simulation(replicas, self._router(), workload).run(self._give_up)

    def _router(self) -> Router:
        capacity = self._capacity
        try:
            return make_router(self._routing, block_size=capacity.block_size, num_blocks=capacity.num_blocks)
        except ValueError as error:
            raise WorkloadError(str(error)) from None


class _Simulation:
    """One run of one workload."""

    def __init__(self, replicas: list[Replica], router: Router, workload: Workload) -> None:
        self._replicas = replicas
        self._router = router
        self._closed = workload.clients is not None
        self._requests = {request.name: request for request in workload.requests}
        self._unsent: Iterator[WorkloadRequest] = iter(workload.requests)
        self._arrivals: list[tuple[float, int, WorkloadRequest]] = []
        self._numbers = itertools.count()
        self._sent: dict[str, float] = {}
        self._where: dict[str, int] = {}
        self._tokens: dict[str, list[float]] = {}
        self._records: list[RequestRecord] = []
        for _ in range(workload.clients or 1):
            self._schedule_next(0.0)

    def _schedule_next(self, now: float) -> None:
        """The next request of an open loop comes at its arrival, that of a client when it has its answer."""
        request = next(self._unsent, None)
        if request is not None:
            moment = now if self._closed else request.arrival
            heapq.heappush(self._arrivals, (moment, next(self._numbers), request))

    def run(self, give_up: Callable[[RequestRecord], bool]) -> Outcome:
        """Each turn sends a request or computes a step of the replica that is furthest behind."""
        stopped = False
        while len(self._records) < len(self._requests) and not stopped:
            events = [
                (event, i) for i, replica in enumerate(self._replicas) if (event := replica.next_event) is not None
            ]
            moment, index = min(events, default=(float("inf"), -1))
            if self._arrivals and self._arrivals[0][0] <= moment:
                self._send(*self._arrivals[0])
            else:
                stopped = self._step(self._replicas[index], give_up)
        return Outcome(
            self._records,
            [replica.records for replica in self._replicas],
            [replica.steps for replica in self._replicas],
            max((record.finished for record in self._records), default=0.0),
            stopped,
        )

    def _send(self, moment: float, _: int, request: WorkloadRequest) -> None:
        heapq.heappop(self._arrivals)
        loads = {number: replica.load for number, replica in enumerate(self._replicas)}
        chosen = self._router.choose(request.prompt_token_ids, request.num_tokens, loads)
        replica = self._replicas[chosen]
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
        self._sent[request.name] = moment
        self._where[request.name] = chosen
        self._tokens[request.name] = []
        replica.load += request.num_tokens
        replica.send(AddRequest(request.name, request.prompt_token_ids, params, arrival=moment))
        if not self._closed:
            self._schedule_next(moment)

    def _step(self, replica: Replica, give_up: Callable[[RequestRecord], bool]) -> bool:
        output = replica.step()
        now = replica.clock.now()
        stopped = False
        for delta in output.deltas:
            tokens = self._tokens[delta.request_id]
            if len(delta.token_ids) == 1:
                tokens.append(now)
            else:
                tokens += [now] * len(delta.token_ids)
            if delta.finish_reason is not None:
                stopped |= give_up(self._finish(delta, now))
        return stopped

    def _finish(self, delta: SequenceDelta, now: float) -> RequestRecord:
        request = self._requests[delta.request_id]
        if delta.finish_reason == "error":
            raise WorkloadError(f"request {delta.request_id} cannot be served: {delta.error}")
        self._replicas[self._where.pop(request.name)].load -= request.num_tokens
        times = self._tokens.pop(request.name)
        record = RequestRecord(
            request.name,
            len(request.prompt_token_ids),
            len(times),
            self._sent.pop(request.name),
            times,
            now,
            started=delta.timing.admitted if delta.timing is not None else None,
        )
        self._records.append(record)
        if self._closed:
            self._schedule_next(now)
        return record


def step_totals(outcome: Outcome) -> Metrics:
    """The numbers of ``step_metrics`` that need no detail, over all replicas; busy is the mean over them."""
    records = [record for replica in outcome.records for record in replica]
    busy = sum(record.elapsed for record in records)
    rows = {
        kind: sum(getattr(record.rows, kind) for record in records)
        for kind in ("prefill", "decode", "recomputed", "padding", "ended")
    }
    total = sum(rows.values())
    useful = rows["prefill"] + rows["decode"]
    device_busy = busy / (outcome.duration * len(outcome.records))
    return {
        "steps": len(records),
        "device_busy": device_busy,
        "useful_share": useful / total,
        "effective_utilisation": device_busy * useful / total,
        "rows_total": total,
        **{f"rows_{kind}": count for kind, count in rows.items()},
        "rows_wasted": total - useful,
        "preemptions": sum(record.preempted for record in records),
        "mean_step_ms": busy / len(records) * 1000,
    }


def with_rate(workload: Workload, rate: float) -> Workload:
    """The same requests with their arrivals stretched to ``rate`` a second on average; their pattern stays."""
    last = max(request.arrival for request in workload.requests)
    if not last > 0:
        raise WorkloadError("arrivals that are all at once have no rate to change")
    factor = len(workload.requests) / rate / last
    return replace(
        workload, requests=tuple(replace(request, arrival=request.arrival * factor) for request in workload.requests)
    )
