"""Threads of a kernel at their meetings."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import njit

from chairlift.model.kernels.pool import ComputeThreads
from chairlift.model.kernels.threads import COUNTER, meet

MEETINGS = 20_000


@njit(nogil=True)
def meet_often(counters: Any, times: int) -> int:
    meetings = 0
    for _ in range(times):
        meetings = meet(counters, 2, meetings)
    return meetings


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_that_meet_soon_again_do_not_sleep() -> None:
    """Where waking takes longer than a thread waits awake, one sleep brings about the next, at every meeting."""
    meet_often(np.zeros(COUNTER, np.int64), 0)
    counters = np.zeros(COUNTER, np.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda _: meet_often(counters, MEETINGS), range(2)))
    slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    assert ends == [MEETINGS, MEETINGS]
    # Other processes may take a core away now and then.
    assert slept < MEETINGS // 4


def test_each_thread_runs_its_part_and_all_have_ended_when_run_returns() -> None:
    threads = ComputeThreads(3)
    seen: list[tuple[int, int]] = []

    def kernel(thread: int, pause: float) -> None:
        time.sleep(pause * thread)
        seen.append((thread, threading.get_ident()))

    for _ in range(2):
        seen.clear()
        threads.run(kernel, 0.02)
        assert [thread for thread, _ in seen] == [0, 1, 2]
        assert len({ident for _, ident in seen}) == 3
        assert seen[0][1] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_thread_that_fails_fails_the_run_and_not_the_next(failing: int) -> None:
    threads = ComputeThreads(3)

    def kernel(thread: int, wrong: bool, seen: list[int]) -> None:
        if wrong and thread == failing:
            raise ValueError(f"thread {thread}")
        seen.append(thread)

    with pytest.raises(ValueError, match=f"thread {failing}"):
        threads.run(kernel, True, [])
    seen: list[int] = []
    threads.run(kernel, False, seen)
    assert sorted(seen) == [0, 1, 2]


def test_threads_end_with_whoever_has_them() -> None:
    before = set(threading.enumerate())
    threads = ComputeThreads(4)
    threads.run(lambda thread: None)
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    del threads
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()
