"""The queue of those that do not run."""

from __future__ import annotations

from support.driving import Driver, request

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.continuous import ContinuousScheduler
from chairlift.scheduling.queue import MOST_STALE, WaitingQueue
from chairlift.scheduling.request import Request


def ranked(name: str, rank: int) -> Request:
    r = request(name, 1, 1)
    r.rank = (0, rank)
    return r


def test_in_order_of_rank_whatever_the_order_of_arrival():
    queue = WaitingQueue()
    for rank in (3, 1, 2, 0):
        queue.push(ranked(f"r{rank}", rank))
    assert [r.request_id for r in queue] == ["r0", "r1", "r2", "r3"]
    assert [queue.pop().request_id for _ in range(len(queue))] == ["r0", "r1", "r2", "r3"]


def test_one_that_was_taken_out_of_the_middle_does_not_come_up():
    queue = WaitingQueue()
    requests = [ranked(f"r{i}", i) for i in range(4)]
    for r in requests:
        queue.push(r)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert [queue.pop().request_id for _ in range(len(queue))] == ["r1", "r3"]


def test_an_id_that_comes_again_is_another_request():
    """The one that was aborted is not taken for it, though it stands before it."""
    driver = Driver(lambda kv: ContinuousScheduler(SchedulerConfig(max_num_seqs=1), kv, 64))
    driver.add(request("first", 4, 2), request("again", [1, 2, 3], 3))
    driver.scheduler.abort("again")
    driver.add(request("again", [7, 8], 1))
    driver.run()
    assert len(driver.tokens["again"]) == 1


def test_it_forgets_those_that_left():
    queue = WaitingQueue()
    stays = ranked("stays", 0)
    queue.push(stays)
    for i in range(1, 4 * MOST_STALE):
        r = ranked(f"r{i}", i)
        queue.push(r)
        queue.remove(r)
    assert len(queue._heap) <= MOST_STALE + 2
    queue.remove(stays)
    assert not queue._heap
    assert len(queue) == 0
