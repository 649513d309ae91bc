"""The rules by which requests give way, one by one."""

from __future__ import annotations

import pytest
from support.driving import request

from chairlift.scheduling.config import SchedulerConfig
from chairlift.scheduling.kv.manager import KVManager
from chairlift.scheduling.preemption import OutputLengths, choose_victim, prefers_swap
from chairlift.scheduling.request import Request


def running(*places: tuple[int, int]) -> list[Request]:
    """Requests in order of rank, each given by its class and the tokens it has computed."""
    requests = []
    for number, (rank_class, computed) in enumerate(places):
        r = request(f"r{number}", computed + 1, 10)
        r.rank, r.num_computed_tokens = (rank_class, number), computed
        requests.append(r)
    return requests


@pytest.mark.parametrize(
    ("places", "requester", "latest", "least_work"),
    [
        (((0, 5), (0, 9), (0, 3), (0, 7)), 0, 3, 2),
        (((0, 1), (0, 9), (0, 7)), 1, 2, 2),  # the first has least computed, but comes before
        (((0, 5), (0, 3), (0, 3)), 0, 2, 2),  # of equals the last
        (((0, 5), (0, 1), (1, 9), (1, 8)), 0, 3, 3),  # the lowest class first, whatever others have computed
        (((0, 1), (0, 9)), 1, 1, 1),  # nobody is behind it
    ],
)
def test_who_gives_way(places: tuple[tuple[int, int], ...], requester: int, latest: int, least_work: int):
    requests = running(*places)
    assert choose_victim(requests, requests[requester], "latest") is requests[latest]
    assert choose_victim(requests, requests[requester], "least-work") is requests[least_work]


@pytest.mark.parametrize(("seconds_per_block", "swaps"), [(0.99, True), (1.01, False)])
def test_a_block_moves_twice_and_a_token_is_computed_once(seconds_per_block: float, swaps: bool):
    [r] = running((0, 16))  # four blocks
    config = SchedulerConfig(recompute_seconds_per_token=0.5, swap_seconds_per_block=seconds_per_block)
    assert prefers_swap(r, KVManager(10, 4), config) == swaps


def test_at_least_one_token_is_expected_of_whoever_runs():
    r = request("a", 4, 10)
    r.max_tokens = 14
    assert OutputLengths().expected_rest(r) == 1
