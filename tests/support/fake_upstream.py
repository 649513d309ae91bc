"""An OpenAI-shaped server that answers at fixed times, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


def chunk(text: str | None, finish_reason: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": text or "", "finish_reason": finish_reason, "logprobs": None}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake", "choices": [choice], **more}
    return f"data: {json.dumps(event)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@dataclass
class FakeUpstream:
    """What it does is set by its fields, at any time.

    Attributes:
        name: is in its text.
        tokens, first_token, token_gap: how an answer comes; seconds.
        fault: ``None``, or how requests fail: ``error`` (HTTP 500), ``hang`` (headers never come), ``hang_in_stream``,
            ``no_done``, ``bad_event``, ``cut``, ``error_event``, ``bad_request``, ``overloaded``, ``not_json``.
        fault_every: the n-th request fails, and every n-th after it.
        fault_after: pieces that come before the fault, in a stream.
        slower_by: seconds more before the first token.
    """

    name: str = "stable"
    tokens: int = 4
    first_token: float = 0.002
    token_gap: float = 0.001
    fault: str | None = None
    fault_every: int = 1
    fault_after: int = 0
    slower_by: float = 0.0
    requests: list[tuple[str, dict[str, str], object]] = field(default_factory=list)
    cancelled: int = 0
    written: int = 0
    open: int = 0
    most_open: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def text(self, tokens: int) -> str:
        return "".join(f" {self.name}{i}" for i in range(tokens))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        decoded = json.loads(body) if body else None
        self.requests.append((request.path_qs, dict(request.headers), decoded))
        fault = self.fault if len(self.requests) % self.fault_every == 0 else None
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._answer(request, decoded, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request, body: dict, fault: str | None) -> web.StreamResponse:
        if request.method != "POST":
            return web.json_response({"from": self.name}, headers={"X-Upstream": self.name, "Keep-Alive": "timeout=5"})
        if fault in ("error", "bad_request", "overloaded"):
            status = {"error": 500, "bad_request": 400, "overloaded": 429}[fault]
            return web.json_response({"error": {"message": f"{self.name} says {fault}"}}, status=status)
        if fault == "hang":
            await asyncio.sleep(3600)
        if not body.get("stream"):
            await asyncio.sleep(self.first_token + self.slower_by + self.token_gap * (self.tokens - 1))
            if fault == "not_json":
                return web.Response(body=b"<html>", content_type="application/json")
            choice = {"index": 0, "text": self.text(self.tokens), "finish_reason": "length"}
            return web.json_response({"object": "text_completion", "choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Upstream": self.name})
        await response.prepare(request)
        await asyncio.sleep(self.first_token + self.slower_by)
        for i in range(int(body.get("max_tokens") or self.tokens)):
            if fault is not None and i == self.fault_after:
                await self._misbehave(response, request, fault)
                return response
            await response.write(chunk(f" {self.name}{i}"))
            self.written += 1
            if self.token_gap:
                await asyncio.sleep(self.token_gap)
        await response.write(chunk(None, "length"))
        if fault != "no_done":
            await response.write(DONE)
        return response

    async def _misbehave(self, response: web.StreamResponse, request: web.Request, fault: str) -> None:
        if fault == "hang_in_stream":
            await asyncio.sleep(3600)
        elif fault == "bad_event":
            await response.write(b'data: {"choices": [{"te\n\n')
        elif fault == "error_event":
            await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        elif fault == "cut":
            assert request.transport is not None
            await response.write(b'data: {"id": "cm')
            request.transport.abort()

    async def generate(self, request: web.Request) -> web.Response:
        """A plain ``POST /generate``."""
        body = await request.json()
        self.requests.append((request.path_qs, dict(request.headers), body))
        return web.json_response({"text": body["prompt"] + self.text(int(body.get("max_tokens", self.tokens)))})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self.health)
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on a port; gives the URL. Handlers are cancelled when their client hangs up."""
        runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
