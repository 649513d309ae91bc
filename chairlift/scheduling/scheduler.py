"""What every batching policy does for the engine's loop."""

from __future__ import annotations

from typing import Protocol

from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.plan import SequenceDelta, StepPlan, StepResult
from chairlift.scheduling.request import Request


class RequestRefusedError(ValueError):
    """The request can never run, whatever else is running. The message says why, with the arithmetic."""


class Scheduler(Protocol):
    """Decides what the next step computes. Time is passed in, never read; one thread calls it."""

    kv: KVManager

    @property
    def num_running(self) -> int:
        """Requests that own device blocks."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that own no blocks."""
        ...

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks lie on the host."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def add(self, request: Request) -> None:
        """Takes a new request.

        Raises:
            RequestRefusedError: it could never run to its end.
        """
        ...

    def abort(self, request_id: str) -> SequenceDelta | None:
        """Ends a request in whatever state it is and frees its blocks; ``None`` if there is no such request."""
        ...

    def fail(self, request_id: str, error: str) -> SequenceDelta | None:
        """Ends a request that cannot go on, as :meth:`abort` does, for the reason ``error``.

        What was computed for it may be nonsense: nobody finds it by its prefix any more.
        """
        ...

    def plan(self, now: float) -> StepPlan:
        """Decides the next step, which is then executed and committed, before the next.

        A step that fails on the way to its commit is dropped; the next plan makes up for it. Only a policy that waits
        for more requests returns an empty plan while there is work, and says until when.
        """
        ...

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceDelta]:
        """Takes what the step computed; returns the new tokens. Requests aborted since are passed over."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not add up. Called by tests after every step."""
        ...


def set_longest(request: Request, kv: KVManager, max_model_len: int) -> None:
    """Sets how long ``request`` may become, or refuses it where it could never run to its end.

    Raises:
        RequestRefusedError: the prompt leaves no room to generate, or even the whole pool could not hold the sequence.
    """
    wanted = request.params.max_tokens
    if request.num_prompt_tokens + (wanted != 0) > max_model_len:
        raise RequestRefusedError(
            f"the prompt has {request.num_prompt_tokens} tokens, which leaves no room to generate within the model's "
            f"length of {max_model_len}"
        )
    longest = max_model_len if wanted is None else min(max_model_len, request.num_prompt_tokens + wanted)
    # The last token that is generated is never computed.
    needed = kv.blocks_for(max(request.num_prompt_tokens, longest - 1))
    if needed > kv.num_blocks:
        raise RequestRefusedError(
            f"{request.num_prompt_tokens} prompt tokens and up to {longest - request.num_prompt_tokens} new ones need "
            f"{needed} KV blocks of {kv.block_size} tokens, but there are {kv.num_blocks} in all"
        )
    request.max_tokens = longest
