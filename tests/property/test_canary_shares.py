"""Shares: exact, sticky, and only ever moving towards the candidate as they rise."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.canary.shares import Splitter

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


@given(share=shares, sizes=st.lists(st.integers(1, 10), min_size=1, max_size=300), seed=st.randoms())
@settings(max_examples=60, deadline=None)
def test_sessions_keep_within_their_size_of_the_share(share: float, sizes: list[int], seed):
    """A session is placed by what is owed when it comes, so the debt never exceeds what one session can add."""
    splitter = Splitter()
    splitter.set_share(share)
    got = total = 0
    for name, size in enumerate(sizes):
        for _ in range(size):
            got += splitter.is_candidates(str(name))
            total += 1
        assert abs(got - share * total) <= max(sizes)


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


def test_a_heavy_session_does_not_make_all_new_ones_pay_its_debt():
    splitter = Splitter()
    splitter.set_share(0.1)
    heavy = splitter.is_candidates("heavy")
    for _ in range(10_000):
        assert splitter.is_candidates("heavy") == heavy
    new = [splitter.is_candidates(str(i)) for i in range(200)]
    assert sum(new) <= 200 * 0.1 + 65
