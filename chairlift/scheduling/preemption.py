"""Who gives way when memory runs out, and in which way; and how to admit so that it seldom does."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.request import Request

SAMPLE_SIZE = 512


def choose_victim(running: Sequence[Request], requester: Request, rule: str) -> Request:
    """Who gives way to ``requester``, which needs a block.

    Only those behind it in rank may, or else the first in rank could be put aside, and nobody would be sure to end.
    Among them, only those of the lowest class. It may be ``requester`` itself, if nobody is behind it.

    Args:
        running: in order of rank.
        requester: one of them.
        rule: "latest" takes the last in rank; "least-work" the one that has least computed, and of those the last.
    """
    last = running[-1]
    if rule == "latest" or last is requester:
        return last
    candidates = (r for r in running if r.rank > requester.rank and r.rank[0] == last.rank[0])
    return min(candidates, key=lambda request: (request.num_computed_tokens, -request.rank[1]))


def prefers_swap(request: Request, kv: KVManager, config: SchedulerConfig) -> bool:
    """Whether moving what is computed of ``request`` to the host and back beats computing it again.

    In "auto" by estimate: a block is moved twice, and a token is computed once. With no speeds measured it recomputes.
    """
    if config.preemption_mode != "auto":
        return config.preemption_mode == "swap"
    moving = 2 * kv.blocks_for(request.num_computed_tokens) * config.swap_seconds_per_block
    computing = request.num_computed_tokens * config.recompute_seconds_per_token
    return moving < computing


class OutputLengths:
    """How much longer a running request will become, judged by those that finished lately."""

    def __init__(self, sample_size: int = SAMPLE_SIZE) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the first of those; made anew when asked for: every request asks, in every step
        self._sample_size = sample_size

    def add(self, num_tokens: int) -> None:
        """Takes the output length of a request that finished."""
        if len(self._recent) == self._sample_size:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums.clear()

    def expected_rest(self, request: Request) -> int:
        """Tokens that ``request`` is expected to generate yet: the mean rest of those that got further than it has.

        Without such a one to judge by: as many as it has generated again. Never more than it may.
        """
        generated = request.num_tokens - request.num_prompt_tokens
        most = request.max_tokens - request.num_tokens
        if not self._sums:
            self._sums = [0, *accumulate(self._sorted)]
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        rest = (self._sums[-1] - self._sums[shorter]) // longer - generated if longer else generated
        return min(most, max(1, rest))
