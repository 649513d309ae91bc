"""Which of several replicas gets a request. The same code routes in a cluster and in the simulator.

A replica is a number; its load is the tokens that the requests sent to it and not yet ended may still need. Replicas
may come and go between two choices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

ROUTES = ("round-robin", "least-load", "prefix-aware")
LOAD_BOUND = 1.1
"""Times the mean load, up to which a replica that has the beginning of a prompt is preferred. Below the 1.3 that no
replica shall exceed, since a request is taken as a whole."""
SLACK_REQUESTS = 2
"""Requests of the size of this one that a replica may have beyond that: while there are few, no load is close to the
mean."""
RECENT_REQUESTS = 100
"""Requests for each replica over which their shares of the work are compared."""


class Router(Protocol):
    """A rule of routing. It keeps what it needs to know of earlier choices."""

    def choose(self, prompt: Sequence[int], work: int, loads: Mapping[int, float], salt: str | None = None) -> int:
        """Returns the replica for a request.

        Args:
            prompt: its token ids.
            work: tokens that it may need, prompt and output.
            loads: of every replica that takes requests, at least one.
            salt: prompts with different salts share nothing in a prefix cache.
        """
        ...

    def forget(self, replica: int) -> None:
        """The replica is gone, or begins anew: nothing is cached there."""
        ...


def make_router(name: str, *, block_size: int, num_blocks: int) -> Router:
    """Returns the router of this name, one of :data:`ROUTES`.

    Args:
        name: "round-robin" takes replicas in turn; "least-load" the one with the least load; "prefix-aware" the one
            that lately got the longest equal beginning, among those that are not much busier than the mean.
        block_size: tokens in a KV block: the prefix cache knows whole blocks.
        num_blocks: KV blocks of a replica: how much of what it got it can still have.

    Raises:
        ValueError: there is none of this name.
    """
    if name == "round-robin":
        return RoundRobin()
    if name == "least-load":
        return LeastLoad()
    if name == "prefix-aware":
        return PrefixAware(block_size, num_blocks)
    raise ValueError(f"--routing must be one of {', '.join(ROUTES)}; got {name!r}")


class _Turns:
    """When each replica was last chosen, for those that are equal otherwise."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._count = 0

    def turn(self, replica: int) -> tuple[int, int]:
        """Sorts the one that waits longest first, and those never chosen by their number."""
        return self._last.get(replica, 0), replica

    def take(self, replica: int) -> int:
        self._count += 1
        self._last[replica] = self._count
        return replica

    def forget(self, replica: int) -> None:
        self._last.pop(replica, None)


class RoundRobin:
    """Replicas in turn, whatever they have to do."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, prompt: Sequence[int], work: int, loads: Mapping[int, float], salt: str | None = None) -> int:  # noqa: ARG002
        """See :class:`Router`."""
        return self._turns.take(min(loads, key=self._turns.turn))

    def forget(self, replica: int) -> None:
        """See :class:`Router`."""
        self._turns.forget(replica)


class LeastLoad:
    """The replica with the least load; of equals, the one that waited longest."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, prompt: Sequence[int], work: int, loads: Mapping[int, float], salt: str | None = None) -> int:  # noqa: ARG002
        """See :class:`Router`."""
        return self._turns.take(min(loads, key=lambda replica: (loads[replica], self._turns.turn(replica))))

    def forget(self, replica: int) -> None:
        """See :class:`Router`."""
        self._turns.forget(replica)


class PrefixAware:
    """The replica that lately got the longest equal beginning of the prompt, within a bound on its load.

    For each replica it remembers the blocks of the prompts sent there, the latest ones, as many as its KV cache holds;
    a block is known by the hash of all tokens up to its end, as in the prefix cache itself. A replica counts as too
    busy where its load, or its share of the work of the last requests, is beyond :data:`LOAD_BOUND` times the mean. The
    first keeps queues short, the second keeps popular beginnings from being left to one replica while there are none.
    This is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016) with the cache in place of the
    hash ring.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        self._recent: dict[int, float] = {}
        self._turns = _Turns()

    def choose(self, prompt: Sequence[int], work: int, loads: Mapping[int, float], salt: str | None = None) -> int:
        """See :class:`Router`."""
        hashes = list(self._hashes(prompt, salt))
        busy = _beyond_bound(loads, loads, work) | _beyond_bound(self._recent, loads, work)
        chosen = min(
            (replica for replica in loads if replica not in busy or len(busy) == len(loads)),
            key=lambda replica: (
                -self._matched(replica, hashes),
                loads[replica],
                self._recent.get(replica, 0.0),
                self._turns.turn(replica),
            ),
        )
        self._remember(chosen, hashes)
        self._count(chosen, work, len(loads))
        return self._turns.take(chosen)

    def forget(self, replica: int) -> None:
        """See :class:`Router`."""
        self._blocks.pop(replica, None)
        self._recent.pop(replica, None)
        self._turns.forget(replica)

    def _hashes(self, prompt: Sequence[int], salt: str | None) -> Iterator[int]:
        """Of each full block with all that stands before it."""
        chain = hash(salt)
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            chain = hash((chain, tuple(prompt[end - self._block_size : end])))
            yield chain

    def _matched(self, replica: int, hashes: Iterable[int]) -> int:
        known = self._blocks.get(replica, ())
        count = 0
        for block in hashes:
            if block not in known:
                break
            count += 1
        return count

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        known = self._blocks.setdefault(replica, OrderedDict())
        for block in reversed(hashes):  # the end of a prompt is forgotten first, as its blocks are
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._num_blocks:
            known.popitem(last=False)

    def _count(self, replica: int, work: int, num_replicas: int) -> None:
        fading = 1 - 1 / (RECENT_REQUESTS * num_replicas)
        for other in self._recent:
            self._recent[other] *= fading
        self._recent[replica] = self._recent.get(replica, 0.0) + work


def _beyond_bound(of: Mapping[int, float], among: Iterable[int], work: int) -> set[int]:
    """The replicas of which one more request of this size would leave more than the bound."""
    having = {replica: of.get(replica, 0.0) for replica in among}
    bound = LOAD_BOUND * (sum(having.values()) + work) / len(having) + (SLACK_REQUESTS - 1) * work
    return {replica for replica, load in having.items() if load > bound}
