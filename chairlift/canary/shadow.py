"""Copies of requests for the candidate, whose answers are held against stable's and dropped."""

from __future__ import annotations

import asyncio
import logging
import time

from chairlift.canary.attempt import Attempt, Watchdog
from chairlift.canary.breaker import Breaker
from chairlift.canary.client import Nobody
from chairlift.canary.connection import UpstreamError
from chairlift.canary.metrics import CanaryMetrics
from chairlift.canary.relay import Answer, RefusedError, relay_checked
from chairlift.canary.request import OVERLOADED, ClientRequest
from chairlift.canary.samples import ANSWERED, DROPPED, FAILED, LEFT, Sample, SampleLog
from chairlift.canary.sse import BrokenStreamError
from chairlift.canary.upstream import Upstream

logger = logging.getLogger(__name__)

MOST_COPIES = 256
"""At once. A candidate that does not keep up gets no more, and no memory is filled with copies that wait for it."""
RESULTS = ("same", "different", "incomparable", "failed", "skipped")


class Copy:
    """One copy: it goes on by itself, and learns in the end what stable answered."""

    def __init__(self, shadow: Shadow, request: ClientRequest) -> None:
        self._stable: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(shadow.run(request, self._stable))

    def settle(self, stable: Answer | None) -> None:
        """Stable has answered this; or nothing."""
        if not self._stable.done():
            self._stable.set_result(stable)

    def drop(self) -> None:
        """The client left: nobody wants to know any more."""
        self.task.cancel()


class Shadow:
    """Sends copies.

    Args:
        candidate: where to.
        log, breaker, metrics: of the candidate.
        watchdog: ends what takes too long.
    """

    def __init__(
        self, candidate: Upstream, log: SampleLog, breaker: Breaker, watchdog: Watchdog, metrics: CanaryMetrics
    ) -> None:
        self._candidate = candidate
        self._log = log
        self._breaker = breaker
        self._watchdog = watchdog
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self.results = dict.fromkeys(RESULTS, 0)

    def start(self, request: ClientRequest) -> Copy | None:
        """Sends a copy of ``request``, unless there are too many under way or the candidate does not answer."""
        if len(self._tasks) >= MOST_COPIES or not self._breaker.allow(time.monotonic()):
            self._count("skipped")
            return None
        copy = Copy(self, request)
        self._tasks.add(copy.task)
        copy.task.add_done_callback(self._tasks.discard)
        return copy

    async def close(self) -> None:
        """Ends the copies that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, request: ClientRequest, stable: asyncio.Future[Answer | None]) -> None:
        """Sends one copy and compares. For :class:`Copy`."""
        sample = self._log.begin(time.monotonic())
        try:
            answer = await self._ask(request, sample)
        except RefusedError as refusal:
            await self._refused(request, sample, refusal, stable)
        except (UpstreamError, BrokenStreamError) as error:
            logger.warning("%s: the candidate failed: %s", request.request_id, error)
            self._breaker.failed(time.monotonic(), str(error))
            self._end(sample, FAILED)
            self._count("failed")
        except BaseException:
            self._breaker.released()
            self._end(sample, LEFT)
            raise
        else:
            self._breaker.succeeded()
            self._end(sample, ANSWERED)
            self._count(_compare(answer, await stable))

    async def _ask(self, request: ClientRequest, sample: Sample) -> Answer:
        attempt = Attempt(sample, streams=request.streams)
        with self._watchdog.watching(attempt), await self._candidate.open(request) as reply:
            return await relay_checked(reply, request, Nobody(), attempt, "candidate", keep_text=True)

    async def _refused(
        self, request: ClientRequest, sample: Sample, refusal: RefusedError, stable: asyncio.Future[Answer | None]
    ) -> None:
        """An error status is the candidate's fault if it says so, or if stable took the same request."""
        own_fault = refusal.status >= 500 or refusal.status in OVERLOADED
        if own_fault:
            self._breaker.failed(time.monotonic(), str(refusal))
        else:
            self._breaker.succeeded()
            answer = await stable
            own_fault = answer is not None and answer.status < 400
        self._end(sample, FAILED if own_fault else DROPPED)
        self._count("failed" if own_fault else "incomparable")
        logger.warning("%s: the candidate refused: %s", request.request_id, refusal)

    def _end(self, sample: Sample, outcome: int) -> None:
        now = time.monotonic()
        if self._log.finish(sample, outcome, now):
            self._metrics.ended("candidate", outcome, sample, now)

    def _count(self, result: str) -> None:
        self.results[result] += 1
        self._metrics.shadow.labels(result).inc()


def _compare(candidate: Answer, stable: Answer | None) -> str:
    if stable is None or stable.status >= 400 or stable.broken or None in (candidate.text, stable.text):
        return "incomparable"
    same = (candidate.text, candidate.finish_reason) == (stable.text, stable.finish_reason)
    return "same" if same else "different"
