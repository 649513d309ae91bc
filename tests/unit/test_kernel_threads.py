"""Threads of a kernel at their meetings."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import njit

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
