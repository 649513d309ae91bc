"""Between an engine that pushes and a client that reads."""

from __future__ import annotations

import asyncio

from chairlift.engine.client import EngineDeadError
from chairlift.scheduling.plan import SequenceDelta


class DeltaStream:
    """Deltas of one request on their way to whoever reads them.

    What a slow reader has not fetched is merged into one delta, so that a stream never holds more than its tokens.
    """

    def __init__(self) -> None:
        self._pending: SequenceDelta | None = None
        self._error: EngineDeadError | None = None
        self._arrived = asyncio.Event()

    def push(self, delta: SequenceDelta) -> None:
        """Takes what came."""
        self._pending = delta if self._pending is None else delta.after(self._pending)
        self._arrived.set()

    def fail(self, error: EngineDeadError) -> None:
        """Has the reader get ``error``, once it has what came before."""
        self._error = error
        self._arrived.set()

    async def next(self) -> SequenceDelta:
        """Waits for what comes next.

        Raises:
            EngineDeadError: nothing will.
        """
        await self._arrived.wait()
        self._arrived.clear()
        if self._pending is not None:
            delta, self._pending = self._pending, None
            if self._error is not None:
                self._arrived.set()
            return delta
        assert self._error is not None  # noqa: S101 - only these two set the event
        raise self._error
