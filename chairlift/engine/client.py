"""How a front end talks to an engine. The API and the offline ``LLM`` class know this and nothing behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import SequenceDelta, StepRecord
from chairlift.scheduling.sampling_params import SamplingParams


class EngineDeadError(RuntimeError):
    """The engine has ended, or cannot go on. The message is the cause.

    Attributes:
        retry_after: seconds after which there may be another engine.
        elsewhere: there is another one now, on which what was asked for can be begun anew. The client that says so has
            done that itself wherever nothing had come of the sequence yet.
    """

    def __init__(self, cause: str, retry_after: float = 1.0, *, elsewhere: bool = False) -> None:
        super().__init__(cause)
        self.retry_after = retry_after
        self.elsewhere = elsewhere


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state as of its last word.

    Attributes:
        running, waiting, swapped: requests in each state.
        kv_cache_usage: share of the KV blocks owned by requests, 0 to 1.
        last_step_age: seconds since a step last ended, or since the engine came up.
        has_work: whether any request is unfinished.
        unfinished: sequences that this front end has open, those included that the engine has not heard of yet.
        alive: whether the engine can still answer.
        wedged: whether there is work and no step has ended for longer than ``step_timeout``.
        retry_after: where the engine is not alive: seconds until there may be another; ``None`` if there will be none.
        restarts: how often another engine took the place of one that had ended.
        last_failure: why an engine last ended, or could not be started.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_cache_usage: float = 0.0
    last_step_age: float = 0.0
    has_work: bool = False
    unfinished: int = 0
    alive: bool = True
    wedged: bool = False
    retry_after: float | None = None
    restarts: int = 0
    last_failure: str | None = None


class AsyncEngineClient(Protocol):
    """An engine as an asyncio program sees it."""

    @property
    def capacity(self) -> Capacity:
        """What fits, and what is loaded: of the newest engine, where one took the place of another."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[SequenceDelta]:
        """Runs one sequence (``params.n`` is not looked at: fan out before).

        Yields deltas as steps end; the last has a ``finish_reason``. Closing the iterator early, or cancelling the
        task that reads it, aborts the request and frees its memory at once.

        Raises:
            EngineDeadError: the engine ended, before or while this ran.
        """
        ...

    def stats(self) -> EngineStats:
        """Returns the state as last heard. Never blocks."""
        ...

    def subscribe(self, on_step: Callable[[StepRecord], None]) -> None:
        """Calls back after each step, on the event loop, with its record; metrics feed on this."""
        ...

    async def close(self) -> None:
        """Ends the engine; requests still open get a :class:`EngineDeadError`."""
        ...
