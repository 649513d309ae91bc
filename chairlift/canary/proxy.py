"""Decides which server answers a request, and what happens when it does not."""

from __future__ import annotations

import json
import logging
import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from chairlift.api.errors import APIError
from chairlift.api.server import ABORT, HAS_ROOM
from chairlift.canary.adapter import AdapterError
from chairlift.canary.attempt import Attempt, OverdueError, RolledBackError, Watchdog
from chairlift.canary.breaker import Breaker
from chairlift.canary.client import Client, ClientStalledError
from chairlift.canary.config import CanaryConfig
from chairlift.canary.connection import UpstreamError
from chairlift.canary.metrics import CanaryMetrics
from chairlift.canary.relay import Answer, RefusedError, relay_as_is, relay_checked
from chairlift.canary.request import OVERLOADED, ClientRequest, read_request
from chairlift.canary.samples import ANSWERED, DROPPED, FAILED, LEFT, Sample, SampleLog
from chairlift.canary.shadow import Shadow
from chairlift.canary.shares import Splitter
from chairlift.canary.sse import BrokenStreamError
from chairlift.canary.upstream import Upstream

logger = logging.getLogger(__name__)


CandidateError = (UpstreamError, BrokenStreamError)


class Proxy:
    """The way of a request: to its side, and to stable if the candidate has not answered by the first byte.

    Args:
        config: the settings.
        stable, candidate: the servers.
        splitter: says who is the candidate's; the share is set by others.
        metrics: where requests are counted.
    """

    def __init__(
        self, config: CanaryConfig, stable: Upstream, candidate: Upstream, splitter: Splitter, metrics: CanaryMetrics
    ) -> None:
        self._config = config
        self._stable, self._candidate = stable, candidate
        self._splitter = splitter
        self._metrics = metrics
        self.logs = {"stable": SampleLog(), "candidate": SampleLog()}
        self.breaker = Breaker()
        self.watchdog = Watchdog(config.timeouts)
        self.main = "stable"
        self.assigned = {"stable": 0, "candidate": 0}
        self._redirectable: dict[Attempt, Client] = {}
        self._shadow = Shadow(candidate, self.logs["candidate"], self.breaker, self.watchdog, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            request = await read_request(scope, receive, self._config.max_body_bytes)
        except APIError as refusal:
            await refusal.response({"connection": "close"})(scope, receive, send)
            return
        except ClientDisconnect:
            return
        client = Client(send, request.request_id, scope[HAS_ROOM], self._config.timeouts.total)
        try:
            async with client.watched(receive):
                await self._answer(request, client)
        except ClientStalledError as error:
            logger.warning("%s: %s; its connection is cut", request.request_id, error)
            scope[ABORT]()  # closed as usual, it would stay until the client has read what is buffered

    @property
    def shadow_results(self) -> dict[str, int]:
        """How copies compared."""
        return dict(self._shadow.results)

    def candidate_lost_traffic(self) -> None:
        """Takes requests back of which the candidate has answered nothing yet; stable gets them."""
        for attempt, client in tuple(self._redirectable.items()):
            if not client.started:
                attempt.end(RolledBackError("rolled back"))

    async def close(self) -> None:
        """Ends the copies that are under way."""
        await self._shadow.close()

    async def _with_copy(self, request: ClientRequest, client: Client, *, copied: bool) -> None:
        """Asks stable, and the candidate for comparison, which changes nothing for the client."""
        copy = self._shadow.start(request) if copied and request.repeatable else None
        if copy is None:
            await self._by_stable(request, client, counted=True)
            return
        try:
            answer = await self._by_stable(request, client, counted=True, keep_text=True)
        except BaseException:
            copy.drop()
            raise
        copy.settle(answer)

    async def _answer(self, request: ClientRequest, client: Client) -> None:
        if not request.canaried:
            if self.main == "candidate" and self.breaker.allow(time.monotonic()):
                await self._by_candidate(request, client, counted=False)
            else:
                await self._by_stable(request, client, counted=False)
            return
        session = self._config.session.session_of(request.headers, request.json, request.address)
        candidate = self._splitter.is_candidates(session)
        side = "candidate" if candidate else "stable"
        self.assigned[side] += 1
        self._metrics.assigned[side].inc()
        if self._config.shadow:
            await self._with_copy(request, client, copied=candidate)
        elif not candidate:
            await self._by_stable(request, client, counted=True)
        elif self.breaker.allow(time.monotonic()):
            await self._by_candidate(request, client, counted=True)
        else:
            self._metrics.fallbacks.labels("breaker").inc()
            await self._by_stable(request, client, counted=False)

    async def _by_candidate(self, request: ClientRequest, client: Client, *, counted: bool) -> None:
        """Asks the candidate, and stable if that fails before the client has seen anything of it."""
        sample = self._begin("candidate", counted)
        attempt = Attempt(sample, streams=request.streams)
        if request.repeatable:
            self._redirectable[attempt] = client
        try:
            with self.watchdog.watching(attempt), await self._candidate.open(request) as reply:
                await relay_checked(reply, request, client, attempt, "candidate")
        except RefusedError as refusal:
            await self._after_refusal(request, client, sample, refusal)
        except RolledBackError as error:
            if client.started:  # the first token came in the same moment
                await self._after_failure(request, client, sample, UpstreamError(str(error)))
                return
            self.breaker.released()
            self._end("candidate", sample, DROPPED)
            self._metrics.fallbacks.labels("rolled_back").inc()
            await self._by_stable(request, client, counted=False)
        except CandidateError as error:
            await self._after_failure(request, client, sample, error)
        except BaseException:  # the client left or stalled, or this is a bug; in any case the request is over
            self.breaker.released()
            self._end("candidate", sample, LEFT)
            raise
        else:
            self.breaker.succeeded()
            self._end("candidate", sample, ANSWERED)
            await client.finish()
        finally:
            self._redirectable.pop(attempt, None)

    async def _after_failure(
        self, request: ClientRequest, client: Client, sample: Sample, error: UpstreamError | BrokenStreamError
    ) -> None:
        self.breaker.failed(time.monotonic(), str(error))
        self._end("candidate", sample, FAILED)
        logger.warning("%s: the candidate failed: %s", request.request_id, error)
        if client.started:
            self._metrics.broken_streams.inc()
            if request.streams:
                failure = APIError(502, "the server's answer broke off; ask again", code="upstream_failed")
                await client.write(b"data: " + json.dumps(failure.body).encode() + b"\n\n", sample)
                await client.finish()
            return  # otherwise the connection is cut: its end would pass for the end of the answer
        if request.repeatable or (isinstance(error, UpstreamError) and not error.reached):
            self._metrics.fallbacks.labels("failure").inc()
            await self._by_stable(request, client, counted=False)
        else:
            await self._tell(client, error)

    async def _after_refusal(
        self, request: ClientRequest, client: Client, sample: Sample, refusal: RefusedError
    ) -> None:
        """Finds out whose fault an error status is: the candidate's, if stable takes the same request."""
        own_fault = refusal.status >= 500 or refusal.status in OVERLOADED
        if own_fault:
            self.breaker.failed(time.monotonic(), str(refusal))
            self._end("candidate", sample, FAILED)
        else:
            self.breaker.succeeded()
        try:
            if not request.repeatable:
                await self._repeat_refusal(client, refusal)
                return
            self._metrics.fallbacks.labels("refusal").inc()
            answer = await self._by_stable(request, client, counted=False, instead=refusal)
            if not own_fault and answer is not None and answer.status < 400:
                logger.warning("%s: the candidate refused what stable takes: %s", request.request_id, refusal)
                self._end("candidate", sample, FAILED)
        finally:
            self._end("candidate", sample, DROPPED)  # unless it was ended before

    async def _by_stable(
        self,
        request: ClientRequest,
        client: Client,
        *,
        counted: bool,
        instead: RefusedError | None = None,
        keep_text: bool = False,
    ) -> Answer | None:
        """Asks stable, and passes on what it says, errors included. Returns ``None`` if it said nothing."""
        sample = self._begin("stable", counted)
        attempt = Attempt(sample, streams=request.streams)
        try:
            try:
                answer = await self._ask_stable(request, client, attempt, keep_text)
            except UpstreamError as error:
                # Once more: its idle connection may have been closed just as the request went out on it.
                again = request.repeatable or not error.reached
                if client.started or isinstance(error, OverdueError) or not again:
                    raise
                answer = await self._ask_stable(request, client, attempt, keep_text)
        except AdapterError as error:
            self._end("stable", sample, DROPPED)
            await self._refuse(client, APIError(400, str(error)))
            return Answer(400)
        except UpstreamError as error:
            self._end("stable", sample, FAILED)
            logger.warning("%s: stable failed: %s", request.request_id, error)
            if not client.started:
                await (self._tell(client, error) if instead is None else self._repeat_refusal(client, instead))
            return None
        except BaseException:
            self._end("stable", sample, LEFT)
            raise
        failed = answer.broken is not None or answer.status >= 500 or answer.status in OVERLOADED
        self._end("stable", sample, FAILED if failed else DROPPED if answer.status >= 400 else ANSWERED)
        await client.finish()
        return answer

    async def _ask_stable(self, request: ClientRequest, client: Client, attempt: Attempt, keep_text: bool) -> Answer:
        with self.watchdog.watching(attempt), await self._stable.open(request) as reply:
            return await relay_as_is(reply, request, client, attempt, "stable", keep_text=keep_text)

    def _begin(self, side: str, counted: bool) -> Sample:
        now = time.monotonic()
        return self.logs[side].begin(now) if counted else Sample(-1, now)

    def _end(self, side: str, sample: Sample, outcome: int) -> None:
        now = time.monotonic()
        if self.logs[side].finish(sample, outcome, now):
            self._metrics.ended(side, outcome, sample, now)

    async def _tell(self, client: Client, error: Exception) -> None:
        """Says that nobody answered."""
        status = 504 if isinstance(error, OverdueError) else 502
        await self._refuse(
            client, APIError(status, "no server answered the request; ask again", code="upstream_failed")
        )

    async def _refuse(self, client: Client, error: APIError) -> None:
        body = json.dumps(error.body).encode()
        await self._whole(client, error.status, [(b"content-type", b"application/json")], body, "router")

    async def _repeat_refusal(self, client: Client, refusal: RefusedError) -> None:
        await self._whole(client, refusal.status, refusal.headers, refusal.body, "candidate")

    async def _whole(
        self, client: Client, status: int, headers: list[tuple[bytes, bytes]], body: bytes, side: str
    ) -> None:
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await client.start(status, [*headers, (b"content-length", str(len(body)).encode())], side)
        await client.write(body, Sample(-1, time.monotonic()))
        await client.finish()
