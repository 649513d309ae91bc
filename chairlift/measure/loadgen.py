"""Sends requests to an OpenAI endpoint when they are due, and writes down what comes back.

What a latency counts from. In an open loop (a finite request rate, or a trace) it is the moment at which the request
was due, whatever the client did meanwhile: a client that is late, or holds a request back because ``max_concurrency``
are already open, would otherwise hide just the waits that a server's slowness causes (coordinated omission). How much
of it was the client's own queue is told apart, as ``client_queue``. In a closed loop (an infinite rate with
``max_concurrency`` clients) a request is due when its client has had its last answer, so there is no such queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from chairlift.measure.datasets import BenchRequest
from chairlift.measure.openai_client import Answer, Prompt, stream_completion
from chairlift.measure.records import RequestRecord

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GIVE_UP_AFTER = 5  # failures in a row, without a success ever, after which there is no point in going on


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go, and how they are put.

    Attributes:
        url: of the endpoint, path included.
        model: as the server calls it.
        chat: whether prompts are put as chats.
        ignore_eos: ask for exactly the output tokens; an extension that vLLM, llama.cpp and this server have.
        extra_body: more fields for each body.
        headers: such as one that authorises.
        timeout: seconds for one request.
    """

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 3600.0

    def body(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        """The JSON object to post."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body |= {"max_tokens": output_tokens, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body


@dataclass(slots=True)
class Load:
    """What came of a load.

    Attributes:
        records: of all requests that were sent, in the order of the data set.
        texts: their answers.
        duration: seconds from the start to the last end.
        most_open: requests that were open at once, at most.
        gave_up: why it ended early; ``None`` if it did not.
        cached_tokens: prompt tokens that the server says it took from a prefix cache; ``None`` where it says nothing.
    """

    records: list[RequestRecord] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    duration: float = 0.0
    most_open: int = 0
    gave_up: str | None = None
    cached_tokens: int | None = None


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float] | None,
    max_concurrency: int | None,
    on_finish: Callable[[], None] = lambda: None,
) -> Load:
    """Sends all requests and waits for all answers.

    Args:
        endpoint: where to.
        requests: what.
        arrivals: seconds after the start at which each is due; ``None`` for a closed loop.
        max_concurrency: most requests open at once; in a closed loop the number of clients, ``None`` for all at once.
        on_finish: called after each answer.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await _Generator(session, endpoint, requests, on_finish).run(arrivals, max_concurrency)


async def warm_up(endpoint: Endpoint, request: BenchRequest, count: int) -> str | None:
    """Sends one request ``count`` times over and returns the first error."""
    load = await run_load(endpoint, [request] * count, None, 1)
    return next((record.error for record in load.records if record.error is not None), None)


class _Generator:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        requests: Sequence[BenchRequest],
        on_finish: Callable[[], None],
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._requests = requests
        self._on_finish = on_finish
        self._answers: dict[int, tuple[float, Answer]] = {}
        self._open = 0
        self._most_open = 0
        self._failures = 0
        self._succeeded = False
        self._gave_up: str | None = None

    async def run(self, arrivals: Sequence[float] | None, max_concurrency: int | None) -> Load:
        self._start = time.perf_counter()
        try:
            await self._run(arrivals, max_concurrency)
        except asyncio.CancelledError:
            self._gave_up = "interrupted"  # what has been measured by now is still worth something
        return self._load()

    async def _run(self, arrivals: Sequence[float] | None, max_concurrency: int | None) -> None:
        if arrivals is None:
            clients = min(max_concurrency or len(self._requests), len(self._requests))
            numbers = iter(range(len(self._requests)))
            await asyncio.gather(*(self._client(numbers) for _ in range(clients)))
        else:
            places = asyncio.Semaphore(max_concurrency or len(self._requests))
            await asyncio.gather(*(self._at(number, due, places) for number, due in enumerate(arrivals)))

    async def _client(self, numbers: Iterator[int]) -> None:
        """Sends one request after another; each is due when the one before it is answered."""
        for number in numbers:
            if self._gave_up is None:
                await self._send(number, time.perf_counter())

    async def _at(self, number: int, due: float, places: asyncio.Semaphore) -> None:
        moment = self._start + due
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        async with places:
            if self._gave_up is None:
                await self._send(number, moment)

    async def _send(self, number: int, due: float) -> None:
        request = self._requests[number]
        self._open += 1
        self._most_open = max(self._most_open, self._open)
        body = self._endpoint.body(request.prompt, request.output_tokens)
        answer = await stream_completion(self._session, self._endpoint.url, body, self._endpoint.headers)
        self._open -= 1
        self._answers[number] = due, answer
        self._watch(answer)
        self._on_finish()

    def _watch(self, answer: Answer) -> None:
        """A server that answers nothing at all is not worth the rest of the load; one that fails at times is."""
        if answer.error is None:
            self._succeeded = True
        else:
            self._failures += 1
            if self._failures >= GIVE_UP_AFTER and not self._succeeded:
                self._gave_up = answer.error

    def _load(self) -> Load:
        load = Load(most_open=self._most_open, gave_up=self._gave_up)
        for number, (due, answer) in sorted(self._answers.items()):
            load.records.append(self._record(number, due, answer))
            load.texts.append(answer.text)
            if answer.cached_tokens is not None:
                load.cached_tokens = (load.cached_tokens or 0) + answer.cached_tokens
        load.duration = max((record.finished for record in load.records), default=0.0)
        return load

    def _record(self, number: int, due: float, answer: Answer) -> RequestRecord:
        request = self._requests[number]
        error = answer.error
        if error is None and not answer.times:
            error = "the answer has no tokens"
        return RequestRecord(
            str(number + 1),
            answer.prompt_tokens if answer.prompt_tokens is not None else request.prompt_tokens,
            answer.output_tokens if answer.output_tokens is not None else len(answer.times),
            due - self._start,
            [moment - self._start for moment in answer.times],
            answer.finished - self._start,
            client_wait=answer.sent - due,
            error=error,
        )
