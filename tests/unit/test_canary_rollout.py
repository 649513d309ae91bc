"""The state machine, by hand."""

from __future__ import annotations

import math

import pytest

from chairlift.canary.gates import parse_gates
from chairlift.canary.judge import Reading, Verdict
from chairlift.canary.rollout import MOST_EVENTS, NotNowError, Rollout

STEPS = (0.1, 0.25, 0.5, 1.0)


def reading(verdict: Verdict, value: float = 1.0, *, enough: bool = True) -> Reading:
    (gate,) = parse_gates("p99_e2e<5s")
    return Reading(gate, verdict, 500, 505, enough, lambda: (value, 0.5, math.inf))


def rollout(**settings) -> Rollout:
    made = Rollout(STEPS, 60.0, **settings)
    made.start(0.0, 1000.0)
    return made


def tick(r: Rollout, now: float, *verdicts: Verdict, stable_up: bool = True, down: str | None = None, **more) -> bool:
    return r.tick(now, now, [reading(v, **more) for v in verdicts], stable_up=stable_up, candidate_down=down)


def test_it_walks_up_one_step_a_hold_and_is_complete_after_the_last():
    r = rollout()
    seen = [r.share]
    now = 0.0
    while r.phase == "running":
        now += 1
        if tick(r, now, "pass", "pass"):
            seen.append(r.share)
    assert seen == [0.1, 0.25, 0.5, 1.0, 1.0]
    assert now == 60.0 * len(STEPS)
    assert [e.kind for e in r.events] == ["started", *["promoted"] * 3, "completed"]
    assert "p99_e2e<5s passes: 1s (0.5s to ∞) over 500 requests, < 5s" in r.events[-1].reason


def test_an_undecided_gate_waits_and_says_so_once():
    r = rollout()
    for now in range(60, 200):
        assert not tick(r, now, "pass", "undecided")
    assert [e.kind for e in r.events] == ["started", "waiting"]
    assert "it takes at least 505" in r.events[-1].reason
    assert tick(r, 200, "pass", "pass")
    assert r.share == 0.25


def test_promotion_on_estimates_needs_enough_requests_and_a_good_estimate():
    r = rollout(promote_undecided=True)
    assert not tick(r, 60, "undecided", enough=False)
    assert not tick(r, 60, "undecided", value=6.0)
    assert tick(r, 60, "undecided", value=4.9)


@pytest.mark.parametrize("prepare", ["running", "held", "complete"])
def test_a_failed_gate_rolls_back_at_once_in_every_phase(prepare: str):
    r = rollout()
    if prepare == "held":
        r.hold_here(0.0)
    if prepare == "complete":
        for now in (60, 120, 180, 240):
            tick(r, now, "pass")
    assert r.phase == prepare
    assert tick(r, 241, "pass", "fail", value=7.0)
    assert (r.phase, r.share) == ("rolled_back", 0.0)
    assert r.events[-1].kind == "rolled_back"
    assert r.events[-1].by == "gate"
    assert "p99_e2e<5s fails: 7s" in r.events[-1].reason
    assert not tick(r, 500, "pass")
    assert r.share == 0.0


def test_a_candidate_that_is_down_is_rolled_back():
    r = rollout()
    assert tick(r, 1, "undecided", down="20 s without an answer; refused")
    assert "refused" in r.events[-1].reason


def test_nothing_is_rolled_back_onto_a_stable_that_is_down():
    r = rollout()
    for now in (1, 2, 3):
        assert not tick(r, now, "fail", stable_up=False)
    assert r.share == 0.1
    assert [e.kind for e in r.events] == ["started", "waiting"]
    assert tick(r, 4, "fail")
    assert r.share == 0.0


def test_operators_steer():
    r = rollout()
    r.hold_here(1.0)
    assert not tick(r, 1000, "pass")
    with pytest.raises(NotNowError, match="only a running one"):
        r.hold_here(1.0)
    r.resume(1000, 1.0)
    assert not tick(r, 1059, "pass")  # the hold begins anew
    assert tick(r, 1060, "pass")
    r.promote(1061, 1.0)
    assert r.share == 0.5
    r.hold_here(1.0)
    r.promote(1062, 1.0)
    assert (r.phase, r.share) == ("running", 1.0)
    r.promote(1063, 1.0)
    assert r.phase == "complete"
    with pytest.raises(NotNowError, match="complete"):
        r.promote(1064, 1.0)
    with pytest.raises(NotNowError, match="only a held"):
        r.resume(1064, 1.0)
    r.roll_back(1.0)
    assert r.share == 0.0
    with pytest.raises(NotNowError, match="promote starts again"):
        r.roll_back(1.0)
    r.promote(2000, 1.0)
    assert (r.phase, r.share) == ("running", 0.1)
    assert r.remaining_hold(2000) == 60.0


def test_events_are_kept_within_bounds_and_can_be_followed():
    r = rollout()
    seen = []
    told = 0
    for _ in range(MOST_EVENTS):
        r.hold_here(1.0)
        r.resume(0, 1.0)
        seen += r.events_since(told)
        told = r.num_events
    assert len(r.events) == MOST_EVENTS
    assert len(seen) == 2 * MOST_EVENTS + 1
    assert r.events_since(told) == []
