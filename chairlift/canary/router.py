"""The router: the proxy, the judge and the rollout, and the clock that drives them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from chairlift.api.lifecycle import Lifecycle, shutting_down
from chairlift.api.server import serve
from chairlift.canary.adapter import load_adapter
from chairlift.canary.config import CanaryConfig
from chairlift.canary.control import Control, is_own
from chairlift.canary.judge import Judge, Reading
from chairlift.canary.metrics import CanaryMetrics
from chairlift.canary.proxy import Proxy
from chairlift.canary.rollout import Event, Rollout
from chairlift.canary.shares import Splitter
from chairlift.canary.state_file import SavedState, load, save
from chairlift.canary.status import status_of
from chairlift.canary.upstream import Upstream

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
SAVE_SESSIONS_SECONDS = 30.0
PROBES_TO_BE_DOWN = 3


class Router:
    """An ASGI application that splits traffic, and what drives its rollout.

    Args:
        config: the settings.
        key: of the control API.
        on_event: called with each event of the rollout.
        tick: seconds between two looks at the gates.

    Raises:
        ConfigError: the state file is damaged or of another rollout, or there is no such adapter.
    """

    def __init__(
        self,
        config: CanaryConfig,
        key: str,
        *,
        on_event: Callable[[Event], None] = lambda _: None,
        tick: float = TICK_SECONDS,
    ) -> None:
        self.config = config
        self.lifecycle = Lifecycle()
        self._on_event = on_event
        self._tick = tick
        adapter = load_adapter(config.adapter) if config.adapter is not None else None
        self._upstreams = {
            "stable": Upstream("stable", config.stable, config.timeouts, key=config.stable_key, adapter=adapter),
            "candidate": Upstream("candidate", config.candidate, config.timeouts, key=config.candidate_key),
        }
        saved = load(config.state_file, config.identity, len(config.steps)) if config.state_file is not None else None
        self.splitter = Splitter(saved.positions if saved else ())
        self.metrics = CanaryMetrics()
        self.proxy = Proxy(config, self._upstreams["stable"], self._upstreams["candidate"], self.splitter, self.metrics)
        self.rollout = Rollout(config.steps, config.hold, config.promote_undecided)
        self.judge = Judge(
            config.gates,
            self.proxy.logs["candidate"],
            self.proxy.logs["stable"],
            window=config.window,
            min_samples=config.min_samples,
            false_rollback=config.false_rollback,
            false_pass=config.false_pass,
            spent_starts=saved.spent_starts if saved else 0,
        )
        self.readings: list[Reading] = []
        self._failed_probes = {"stable": 0, "candidate": 0}
        self._told = 0
        self._saved: tuple[object, ...] = ()
        self._saved_at = -SAVE_SESSIONS_SECONDS
        self._begin(saved)
        self.control = Control(key, self.status, self.act, self._render_metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if is_own(scope["path"]):
            await self.control(scope, receive, send)
        elif self.lifecycle.draining:
            await shutting_down().response()(scope, receive, send)
        else:
            await self.proxy(scope, receive, send)

    def status(self) -> dict[str, Any]:
        """Returns the state, as JSON."""
        return status_of(self, time.monotonic())

    def up(self) -> dict[str, bool]:
        """Returns which side is well."""
        candidate = self._failed_probes["candidate"] < PROBES_TO_BE_DOWN
        return {
            "stable": self._failed_probes["stable"] < PROBES_TO_BE_DOWN,
            "candidate": candidate and self.proxy.breaker.state(time.monotonic()) == "closed",
        }

    def act(self, action: str) -> None:
        """Does what an operator asks: ``promote``, ``hold``, ``resume`` or ``rollback``.

        Raises:
            NotNowError: it makes no sense now.
        """
        now, wall = time.monotonic(), time.time()
        was_rolled_back = self.rollout.phase == "rolled_back"
        if action == "promote":
            self.rollout.promote(now, wall)
            if was_rolled_back:
                self.proxy.breaker.succeeded()
                self.judge.begin_rollout(now)
            else:
                self.judge.begin_step(now)
        elif action == "hold":
            self.rollout.hold_here(wall)
        elif action == "resume":
            self.rollout.resume(now, wall)
            self.judge.begin_step(now)
        else:
            self.rollout.roll_back(wall)
        self._apply()

    def look(self, now: float) -> None:
        """Reads the gates and lets the rollout move."""
        share = self.rollout.share
        self.readings = self.judge.read(now, compare=self.config.shadow or share < 1.0)
        breaker = self.proxy.breaker
        down = breaker.down_for(now)
        changed = self.rollout.tick(
            now,
            time.time(),
            self.readings,
            stable_up=self.up()["stable"],
            candidate_down=f"{down:.0f} s without an answer; {breaker.last_cause}"
            if down >= self.config.down_after
            else None,
        )
        if changed and self.rollout.phase == "running":
            self.judge.begin_step(now)
        self._apply()

    async def run(self, sock: socket.socket, on_ready: Callable[[str], None] = lambda _: None) -> None:
        """Serves on ``sock`` until SIGINT or SIGTERM, lets open answers end, and saves the state."""
        background = [
            asyncio.create_task(work) for work in (self._look_forever(), self.proxy.watchdog.run(), *self._probes())
        ]
        serving = asyncio.create_task(
            serve(
                self,
                sock,
                on_ready=on_ready,
                lifecycle=self.lifecycle,
                shutdown_timeout=self.config.drain_timeout,
                half_close_is_hang_up=True,
            )
        )
        try:
            # Whichever ends first: background work ends only by a bug, which must not leave a router without gates.
            await asyncio.wait([serving, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()
            await serving
        finally:
            for task in (*background, serving):
                task.cancel()
            await asyncio.gather(*background, serving, return_exceptions=True)
            await self.proxy.close()
            for upstream in self._upstreams.values():
                upstream.close()
            await self._save(always=True)

    def _begin(self, saved: SavedState | None) -> None:
        now, wall = time.monotonic(), time.time()
        if saved is None:
            self.rollout.start(now, wall)
        else:
            saved.apply(self.rollout)
            self._told = self.rollout.num_events
            self.rollout.restore(now, wall)
        self.judge.begin_step(now)
        self._apply()

    def _apply(self) -> None:
        """Lets the proxy follow the rollout, and tells what happened."""
        rollout = self.rollout
        self.splitter.set_share(rollout.share)
        complete = rollout.phase == "complete" and not self.config.shadow
        self.proxy.main = "candidate" if complete else "stable"
        if rollout.phase == "rolled_back":
            self.proxy.candidate_lost_traffic()
        for event in rollout.events_since(self._told):
            logger.info("%s, %g %%, by %s: %s", event.kind, event.share * 100, event.by, event.reason)
            self._on_event(event)
        self._told = rollout.num_events

    async def _look_forever(self) -> None:
        while True:
            try:
                self.look(time.monotonic())
                await self._save()
            except Exception:  # a bug here must not take the traffic down
                logger.exception("the gates could not be read; the share stays as it is")
            await asyncio.sleep(self._tick)

    def _probes(self) -> list[Any]:
        return [self._probe_forever(name) for name in self._upstreams]

    async def _probe_forever(self, name: str) -> None:
        interval = self.config.health_interval
        while True:
            before = time.monotonic()
            cause = await self._upstreams[name].probe(self.config.health_path, interval)
            if time.monotonic() - before > 1.5 * interval:
                cause = None  # the router itself stood still, so this says nothing
            self._failed_probes[name] = self._failed_probes[name] + 1 if cause else 0
            if cause and name == "candidate":
                self.proxy.breaker.failed(time.monotonic(), cause)
            await asyncio.sleep(interval)

    async def _save(self, *, always: bool = False) -> None:
        """Saves what changed: the rollout at once, sessions every now and then."""
        path = self.config.state_file
        if path is None:
            return
        rollout = self.rollout
        current = (rollout.phase, rollout.step, rollout.num_events, self.judge.spent_starts)
        now = time.monotonic()
        if not always and current == self._saved and now - self._saved_at < SAVE_SESSIONS_SECONDS:
            return
        self._saved, self._saved_at = current, now
        state = SavedState(
            self.config.identity,
            rollout.phase,
            rollout.step,
            self.judge.spent_starts,
            list(rollout.events),
            self.splitter.positions,
        )
        try:
            await asyncio.to_thread(save, path, state)
        except OSError as error:
            logger.error("cannot save the state to %s: %s", path, error)

    def _render_metrics(self) -> bytes:
        return self.metrics.render(self.rollout, self.readings, self.up())
