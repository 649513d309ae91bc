"""A router between two fake servers, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from support.fake_upstream import FakeUpstream

from chairlift.api.server import bind
from chairlift.canary.config import CanaryConfig, Timeouts
from chairlift.canary.connection import Connections
from chairlift.canary.gates import parse_gates
from chairlift.canary.router import Router
from chairlift.canary.session import SessionRule

KEY = "the-key"
EACH_ITS_OWN = SessionRule(fallback="request")


@dataclass
class Routed:
    """A running router and its two servers."""

    url: str
    router: Router
    stable: FakeUpstream
    candidate: FakeUpstream
    http: aiohttp.ClientSession
    serving: asyncio.Task[None]
    answers: Counter[str] = field(default_factory=Counter)

    async def ask(
        self, *, stream: bool = True, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body
    ) -> tuple[int, str, str]:
        """Status, side and text of one request; ``broken`` in the text says that the answer was not whole."""
        body = {"model": "m", "prompt": "x", "stream": stream} | body
        try:
            async with self.http.post(self.url + path, json=body, headers=headers) as response:
                text = await response.text()
                side = response.headers["x-chairlift-canary"]
                if stream and response.status == 200 and (not text.endswith("data: [DONE]\n\n") or '"error"' in text):
                    text = f"broken: {text}"
        except aiohttp.ClientError as error:
            return 0, "none", f"broken: {error}"
        self.answers[f"{response.status} {side}"] += 1
        return response.status, side, text

    def vanish(self, side: str) -> None:
        """Lets nothing listen any more where a server was: on the discard port."""
        self.replace(side, "http://127.0.0.1:9")

    def replace(self, side: str, url: str) -> None:
        """Puts another server in the place of a side's."""
        self.router._upstreams[side].connections = Connections(url, 5.0)

    async def act(self, action: str, key: str = KEY) -> tuple[int, dict]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.url}/canary/{action}", headers=headers) as response:
            return response.status, await response.json()

    async def status(self) -> dict:
        async with self.http.get(f"{self.url}/canary/status") as response:
            return await response.json()

    async def metrics(self) -> str:
        async with self.http.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def until(self, true, looks: int = 3000) -> None:
        """Looks often, and not for so long: a machine may stand still for a while."""
        for _ in range(looks):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not happen")


@asynccontextmanager
async def routed(
    stable: FakeUpstream | None = None,
    candidate: FakeUpstream | None = None,
    *,
    gates: str = "p99_e2e<30s,error_rate<1%",
    tick: float = 0.05,
    **settings,
) -> AsyncIterator[Routed]:
    """Runs everything. By default half of the requests go to the candidate, each by itself, and nothing is promoted."""
    stable = stable or FakeUpstream("stable")
    candidate = candidate or FakeUpstream("candidate")
    defaults = {
        "steps": (0.5, 1.0),
        "hold": 3600.0,
        "session": EACH_ITS_OWN,
        "timeouts": Timeouts(),
        "health_interval": 3600.0,
    }
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(upstream.running()) for upstream in (stable, candidate)]
        config = CanaryConfig(stable=urls[0], candidate=urls[1], gates=parse_gates(gates), **{**defaults, **settings})
        router = Router(config, KEY, tick=tick)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(router.run(bind("127.0.0.1", 0), ready.set_result))
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        try:
            yield Routed(await ready, router, stable, candidate, http, serving)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
