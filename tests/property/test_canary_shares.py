"""Shares: exact, sticky, and only ever moving towards the candidate as they rise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.canary.shares import CATCH_UP, Splitter

shares = st.floats(0.0, 1.0)


@given(share=shares, requests=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_requests_without_a_session_keep_within_one_request_of_the_share(share: float, requests: int):
    splitter = Splitter()
    splitter.set_share(share)
    got = 0
    for n in range(1, requests + 1):
        got += splitter.is_candidates(None)
        assert abs(got - share * n) <= 1


@given(share=shares, sizes=st.lists(st.integers(1, 10), min_size=1, max_size=400))
@settings(max_examples=60, deadline=None)
def test_sessions_of_any_sizes_one_after_another_keep_near_the_share(share: float, sizes: list[int]):
    """However sizes fall in with turns, the turns shift until it evens out, well within the debt that doubles them."""
    splitter = Splitter()
    splitter.set_share(share)
    got = total = 0
    for name, size in enumerate(sizes):
        for _ in range(size):
            got += splitter.is_candidates(str(name))
            total += 1
        assert abs(got - share * total) <= CATCH_UP + 2 * max(sizes)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("open_at_once", [1, 10, 50])
def test_2000_requests_of_interleaved_sessions_are_within_two_points(share: float, open_at_once: int):
    rng = random.Random(open_at_once)
    splitter = Splitter()
    splitter.set_share(share)
    sessions: list[tuple[int, int]] = []
    got = names = 0
    for _ in range(2000):
        while len(sessions) < open_at_once:
            names += 1
            sessions.append((names, rng.randint(1, 10)))
        name, left = sessions.pop(rng.randrange(len(sessions)))
        got += splitter.is_candidates(str(name))
        if left > 1:
            sessions.append((name, left - 1))
    assert abs(got - 2000 * share) <= 40


@given(share=st.floats(0.01, 0.99), sessions=st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_sessions_of_one_request_keep_within_two_of_the_share(share: float, sessions: int):
    splitter = Splitter()
    splitter.set_share(share)
    got = sum(splitter.is_candidates(str(name)) for name in range(sessions))
    assert abs(got - share * sessions) <= 2


@given(st.lists(shares, min_size=1, max_size=8), st.lists(st.integers(0, 60), min_size=1, max_size=400))
@settings(max_examples=60, deadline=None)
def test_raising_the_share_moves_sessions_to_the_candidate_and_never_back(steps: list[float], sessions: list[int]):
    splitter = Splitter()
    on_candidate: set[int] = set()
    for share in sorted(steps):
        splitter.set_share(share)
        for session in sessions:
            side = splitter.is_candidates(str(session))
            assert side or session not in on_candidate
            if side:
                on_candidate.add(session)
            assert splitter.is_candidates(str(session)) == side  # sticky


@given(share=st.floats(0.05, 0.95), higher=st.floats(0.05, 0.95))
@settings(max_examples=50, deadline=None)
def test_old_sessions_alone_have_the_new_share_as_well(share: float, higher: float):
    share, higher = sorted((share, higher))
    splitter = Splitter()
    splitter.set_share(share)
    for session in range(1000):
        splitter.is_candidates(str(session))
    splitter.set_share(higher)
    assert abs(sum(splitter.is_candidates(str(session)) for session in range(1000)) - 1000 * higher) <= 10


def test_none_and_all():
    splitter = Splitter()
    assert not any(splitter.is_candidates(name) for name in (None, "a", "b"))
    splitter.set_share(1.0)
    assert all(splitter.is_candidates(name) for name in (None, "a", "b", "c"))


def test_sessions_survive_in_their_positions_and_the_oldest_are_forgotten():
    splitter = Splitter(most_sessions=100)
    splitter.set_share(0.3)
    sides = {name: splitter.is_candidates(str(name)) for name in range(100)}
    again = Splitter(splitter.positions, most_sessions=100)
    again.set_share(0.3)
    assert {name: again.is_candidates(str(name)) for name in range(100)} == sides
    again.is_candidates("0")
    again.is_candidates("new")
    assert len(again) == 100
    names = [name for name, _ in again.positions]
    assert splitter.positions[0][0] == names[-2]  # session 0 was used, so 1 went
    assert splitter.positions[1][0] not in names


def test_a_heavy_session_does_not_bring_a_rush_over_the_candidate():
    splitter = Splitter()
    splitter.set_share(0.1)
    heavy = splitter.is_candidates("heavy")
    for _ in range(10_000):
        assert splitter.is_candidates("heavy") == heavy
    new = [splitter.is_candidates(str(i)) for i in range(200)]
    assert sum(new) <= 2 * 200 * 0.1 + 1
