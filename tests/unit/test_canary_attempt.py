"""How a request at a server is ended from outside."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.canary.attempt import Attempt, OverdueError, RolledBackError, Watchdog
from chairlift.canary.config import Timeouts
from chairlift.canary.connection import UpstreamError
from chairlift.canary.samples import Sample


def attempt() -> Attempt:
    return Attempt(Sample(0, 0.0), streams=True)


def test_what_ends_it_is_raised_where_it_waits():
    async def main() -> None:
        ended = attempt()
        asyncio.get_running_loop().call_soon(ended.end, RolledBackError("back"))
        with pytest.raises(RolledBackError, match="back"), Watchdog(Timeouts()).watching(ended):
            await asyncio.sleep(5)
        await asyncio.sleep(0)  # the task is as if it had not been cancelled
        assert asyncio.current_task().cancelling() == 0
        ended.end(RolledBackError("too late"))
        await asyncio.sleep(0)

    asyncio.run(main())


def test_somebody_elses_cancellation_stays_one():
    async def main() -> None:
        both = attempt()

        async def work() -> None:
            with Watchdog(Timeouts()).watching(both):
                await asyncio.sleep(5)

        for order in (0, 1):
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            ends = [task.cancel, lambda: both.end(OverdueError("late"))]
            ends[order]()
            ends[1 - order]()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_second_try_knows_nothing_of_how_the_first_ended():
    async def main() -> None:
        twice = attempt()
        watchdog = Watchdog(Timeouts())

        async def fail() -> None:
            twice.end(OverdueError("late"))
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                raise UpstreamError("of its own") from None

        with pytest.raises(UpstreamError, match="of its own"), watchdog.watching(twice):
            await fail()
        assert asyncio.current_task().cancelling() == 0
        asyncio.get_running_loop().call_soon(twice.end, OverdueError("late again"))
        with pytest.raises(OverdueError, match="late again"), watchdog.watching(twice):
            await asyncio.sleep(5)

    asyncio.run(main())
