"""What one request of the API used of the engine, gathered from its sequences as they end."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestAccount:
    """Sums and times over the sequences of one request; times are seconds, ``None`` where a stage was not reached.

    Attributes:
        sequences: how many it has, prompts times n.
        prompt_tokens, completion_tokens, cached_tokens: over all sequences: the prompt of each, what was generated, and
            what of the prompts the prefix cache had.
        queue, prefill, decode: the longest that one of them waited for its first step, took from there to its first
            token, and from there to its last.
        time_to_first_token: the shortest, from when the engine was asked.
        preemptions: how often they were put aside.
        finish_reasons: how they ended, in the order in which they did, each reason once.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    time_to_first_token: float | None = None
    preemptions: int = 0
    finish_reasons: list[str] = field(default_factory=list)

    def end(self, finish_reason: str) -> None:
        """Adds how a sequence ended."""
        if finish_reason not in self.finish_reasons:
            self.finish_reasons.append(finish_reason)


current_account: ContextVar[RequestAccount | None] = ContextVar("current_account", default=None)
"""The account of the request that the running task works for: tasks inherit it from the one that starts them."""


def longest(one: float | None, other: float | None) -> float | None:
    """The larger of two times, where there are two."""
    return max((time for time in (one, other) if time is not None), default=None)
