"""The order in which waiting requests are admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from chairlift.scheduling.request import Request


class FCFSQueue:
    """First come, first served; a preempted request keeps its place, which is before every one that came later.

    Any request can be taken out in constant time, and the head is known in constant time, however long the queue is.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """Adds a request that has just arrived, behind all others."""
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        """Returns a request that was admitted and is put aside.

        It goes to the front: all that were admitted came before all that wait. Several put aside in one step are
        returned latest arrival first, so that they stand in order afterwards.
        """
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The next in line. The queue must not be empty."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Takes the next in line. The queue must not be empty."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Takes a request out of wherever it stands."""
        del self._requests[request.request_id]
