"""What one run of a workload leaves behind: a record for each request and one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.scheduling.plan import StepRecord


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times are in seconds after the start of the run.

    Attributes:
        name: of the request in its workload.
        prompt_tokens, output_tokens: asked and received.
        sent: when it was due to be sent, which is where its latencies begin.
        token_times: when the client had each token; several are equal where they came together.
        finished: when the client knew that there is no more.
        started: when the engine first planned it, where that is known.
        client_wait: seconds after ``sent`` that it spent in the client, held back or late.
        error: why it failed; a failed request has no latency.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    sent: float
    token_times: Sequence[float]
    finished: float
    started: float | None = None
    client_wait: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from send to first token."""
        return self.token_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from send to the end of the answer."""
        return self.finished - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, (E2E − TTFT)/(n − 1); ``None`` for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens: every gap."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """What one step computed for one sequence.

    Attributes:
        name: of its request.
        rows: token rows, padding included.
        padding: rows of padding among them.
        sampled: whether a token was sampled.
        ended: whether its request had all its tokens before this step, so that the rows are for nobody.
    """

    name: str
    rows: int
    padding: int
    sampled: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class StepDetail:
    """One step: the engine's own record, with the sequences in it and the KV memory that they held while it ran.

    Attributes:
        record: the engine's. Its time is in seconds after the start of the run here.
        work: the sequences, in the order of the rows.
        admitted, preempted: names of the requests that began, or were put aside, in this step.
        kv_reserved: tokens that the blocks owned by requests can hold.
        kv_used: tokens of them that are computed, this step's included, and that a request still needs.
    """

    record: StepRecord
    work: Sequence[SequenceWork]
    admitted: Sequence[str]
    preempted: Sequence[str]
    kv_reserved: int
    kv_used: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload under one policy.

    Attributes:
        requests: in the order in which they ended.
        steps: in order.
        duration: seconds from the start to the end of the last request.
    """

    requests: Sequence[RequestRecord]
    steps: Sequence[StepDetail]
    duration: float
