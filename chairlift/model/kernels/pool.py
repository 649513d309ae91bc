"""The threads that run a kernel together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ComputeThreads:
    """So many threads, of which the one that calls is the first.

    Args:
        count: of threads, the caller's included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(max(1, count - 1), thread_name_prefix="chairlift-compute")

    def run(self, kernel: Any, *arguments: Any) -> None:
        """Calls ``kernel(thread, *arguments)`` on each thread. While kernels run, others can have the GIL."""
        others = [self._pool.submit(kernel, thread, *arguments) for thread in range(1, self.count)]
        kernel(0, *arguments)
        for other in others:
            other.result()
