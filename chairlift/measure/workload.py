"""What is asked of an engine: prompts, output lengths, and when each request is sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np


class WorkloadError(ValueError):
    """A workload that cannot be made. The message says what to change."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        name: told in reports, and unique in its workload.
        prompt_token_ids: the prompt.
        output_tokens: generated exactly, at least 1: end-of-sequence tokens are ignored and the length is the limit.
        arrival: seconds after the start at which it is sent; in a closed loop it has no meaning and is 0.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    arrival: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt_token_ids or self.output_tokens < 1:
            raise WorkloadError(f"request {self.name} needs a prompt and at least one token of output")

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt_token_ids) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and how they arrive.

    Attributes:
        name: such as "peak-50".
        description: one sentence for people.
        requests: in the order in which they are sent.
        clients: in a closed loop, how many clients there are. Each sends the next request of the list, and when it is
            answered the next one after that, without a pause. ``None`` for an open loop, which sends each request at
            its ``arrival`` whatever has become of those before it.
    """

    name: str
    description: str
    requests: tuple[WorkloadRequest, ...]
    clients: int | None = None

    def __post_init__(self) -> None:
        if not self.requests:
            raise WorkloadError(f"workload {self.name} has no requests")
        if len({request.name for request in self.requests}) < len(self.requests):
            raise WorkloadError(f"workload {self.name} has two requests of one name")
        if self.clients is not None and self.clients < 1:
            raise WorkloadError(f"a closed loop needs at least one client, got {self.clients}")

    @property
    def prompt_tokens(self) -> int:
        """Over all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Over all requests."""
        return sum(request.output_tokens for request in self.requests)

    def head(self, count: int) -> Workload:
        """The same workload cut to its first ``count`` requests."""
        return replace(self, requests=self.requests[:count])


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids drawn evenly, so that no two prompts share a prefix that a cache could find."""
    return tuple(int(token) for token in rng.integers(0, vocab_size, length))


def make_requests(
    lengths: Sequence[tuple[int, int]], vocab_size: int, rng: np.random.Generator, arrivals: Sequence[float] = ()
) -> tuple[WorkloadRequest, ...]:
    """Random prompts for (prompt tokens, output tokens) pairs, named "1", "2" and so on; all at 0 without arrivals."""
    times: Iterator[float] = iter(arrivals) if arrivals else itertools.repeat(0.0)
    return tuple(
        WorkloadRequest(str(number), random_prompt(rng, prompt, vocab_size), output, arrival)
        for number, ((prompt, output), arrival) in enumerate(zip(lengths, times, strict=False), 1)
    )
