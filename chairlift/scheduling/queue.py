"""The order in which those that do not run are admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from chairlift.scheduling.request import Request

MOST_STALE = 1024  # entries of requests long gone that are not worth tidying up


class WaitingQueue:
    """Requests by rank: those put aside keep the rank they came with, and so their place.

    The next in line is known in constant time, and any request can be taken out in constant time, however many wait: a
    request that left by another door is only noticed when it comes to the head.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In order of rank."""
        return iter(sorted(self._waiting.values(), key=lambda request: request.rank))

    def push(self, request: Request) -> None:
        """Adds a request that is not in the queue."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request))

    def peek(self) -> Request:
        """The next in line. The queue must not be empty."""
        while self._waiting.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Takes the next in line. The queue must not be empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Takes a request out of wherever it stands."""
        del self._waiting[request.request_id]
        if not self._waiting or len(self._heap) > 2 * len(self._waiting) + MOST_STALE:
            self._heap = [(waiting.rank, waiting) for waiting in self._waiting.values()]
            heapq.heapify(self._heap)
