"""Where replicas go: a placement group and an actor for each, by Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from chairlift.cluster.host import EngineHost
from chairlift.cluster.nodes import Bundle
from chairlift.cluster.wire import Abort, Begin, Loaded, News
from chairlift.config import EngineConfig
from chairlift.engine.process import Failed
from chairlift.logs import LogConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
TELL_SECONDS = 30.0


class RayActor:
    """An :class:`~chairlift.cluster.host.EngineHost` in a placement group of its own.

    The ranks of a model share a machine, so a replica reserves one bundle, which no two nodes can split. Ray gives a
    group to the node with the most room, which spreads replicas over the nodes.

    Args:
        number: of the replica.
        bundle: what it reserves.
        config, num_threads, logs: of the :class:`~chairlift.cluster.host.EngineHost`.
    """

    def __init__(
        self, number: int, bundle: Bundle, config: EngineConfig, num_threads: int | None, logs: LogConfig
    ) -> None:
        self._number = number
        self._group = placement_group([dict(bundle)], strategy="STRICT_PACK", name=f"chairlift-replica-{number}")
        self._actor: Any = (
            ray.remote(EngineHost)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
            )
            .remote(number, config, num_threads, logs)
        )

    async def placed(self) -> None:
        """Waits until there is room."""
        begun = told = time.monotonic()
        # Asked again and again: to wait in a thread would take it from all else that needs one for a moment.
        while not await asyncio.to_thread(self._has_place):
            await asyncio.sleep(POLL_SECONDS)
            if (now := time.monotonic()) - told >= TELL_SECONDS:
                told = now
                logger.warning("replica %d has waited for room for %.0f s; see ray status", self._number, now - begun)

    def _has_place(self) -> bool:
        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def start(self) -> Awaitable[Loaded | Failed]:
        """Loads the engine."""
        return _result(self._actor.start.remote())

    def submit(self, commands: Sequence[Begin | Abort]) -> Awaitable[None]:
        """Sends commands."""
        return _result(self._actor.submit.remote(commands))

    def poll(self) -> Awaitable[News]:
        """Waits for what is new."""
        return _result(self._actor.poll.remote())

    def close(self) -> Awaitable[None]:
        """Ends the engine."""
        return _result(self._actor.close.remote())

    async def remove(self) -> None:
        """Kills the actor and gives its place back."""
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        try:
            ray.kill(self._actor)
            remove_placement_group(self._group)
        except Exception as error:  # the cluster may be gone
            logger.warning("a placement group could not be removed: %s", error)


def _result(reference: Any) -> Awaitable[Any]:
    return asyncio.wrap_future(reference.future())
