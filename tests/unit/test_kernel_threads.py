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

from chairlift.model.kernels.memory import pointer
from chairlift.model.kernels.pieces import AHEAD, claim_ahead, meet_fetching, piece_of, take
from chairlift.model.kernels.pool import ComputeThreads
from chairlift.model.kernels.threads import COUNTER, claim, meet

MEETINGS = 20_000


@njit(nogil=True)
def meet_often(counters: Any, times: int) -> int:
    meetings = 0
    for _ in range(times):
        meetings = meet(counters, 2, meetings)
    return meetings


def sleeps_of_many_meetings() -> int:
    counters = np.zeros(COUNTER, np.int64)
    cores = sorted(os.sched_getaffinity(0))[:2]

    def run(core: int) -> int:
        # Where another process has one core, both threads would share the other, and could only meet by sleeping.
        os.sched_setaffinity(0, {core})
        return int(meet_often(counters, MEETINGS))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(run, cores))
    assert ends == [MEETINGS, MEETINGS]
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_that_meet_soon_again_do_not_sleep() -> None:
    """Where waking takes longer than a thread waits awake, one sleep brings about the next, at every meeting."""
    meet_often(np.zeros(COUNTER, np.int64), 0)
    # Other processes may take a core away now and then.
    assert sleeps_of_many_meetings() < MEETINGS // 4


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


@njit
def piece_at(piece: int, strips: int, threads: int) -> Any:
    """Pieces of kernels can be called by compiled code alone."""
    return piece_of(piece, strips, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_pieces_are_all_strips_once_and_large_ones_come_in_turns_of_all_threads(threads: int) -> None:
    for strips in (0, 2, 4, 6, 30, 36, 60, 192, 198):
        pieces = []
        while not pieces or pieces[-1][0] < strips:
            pieces.append(piece_at(len(pieces), strips, threads))
        *pieces, nothing = pieces
        assert [strip for first, last in pieces for strip in range(first, last)] == list(range(strips))
        assert nothing == piece_at(len(pieces) + 5, strips, threads) == (strips, strips)
        sizes = [last - first for first, last in pieces]
        assert sizes == sorted(sizes, reverse=True)
        assert all(size in (2, 4, 8) for size in sizes)
        assert sizes.count(8) % threads == sizes.count(4) % threads == 0
        assert sizes.count(2) < 2 * threads


@njit(nogil=True)
def take_all(counters: Any, stages: int, columns: int, weights: Any, takers: Any, me: int, threads: int) -> int:
    """Marks the strips of each stage that this thread is given."""
    ahead = np.zeros(AHEAD, np.int64)
    words, meetings = 3, 0
    for stage in range(1, stages + 1):
        claim_ahead(0, columns, words, threads, counters, stage, ahead)
        meetings = meet_fetching(counters, threads, meetings, pointer(weights, 0), ahead)
        first, last = take(ahead)
        while first < last:
            takers[stage - 1, first:last] += 1
            first, last = piece_of(claim(counters, stage), columns // 16, threads)
    return meetings


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_is_claimed_before_a_meeting_is_taken_once(threads: int) -> None:
    stages, columns = 200, 36 * 16
    weights, takers = np.zeros(3 * columns, np.int32), np.zeros((stages, columns // 16), np.int64)
    counters = np.zeros((stages + 1) * COUNTER, np.int64)
    with ThreadPoolExecutor(threads) as pool:
        arguments = [(counters, stages, columns, weights, takers, me, threads) for me in range(threads)]
        meetings = list(pool.map(lambda given: take_all(*given), arguments))
    assert meetings == [stages] * threads
    assert (takers == 1).all()
