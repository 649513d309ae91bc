"""What is known of requests, and from which side."""

from __future__ import annotations

import math

from chairlift.canary.samples import ANSWERED, DROPPED, FAILED, LEFT, Sample, SampleLog


def values(column) -> list[float]:
    return column.values.tolist()


def log_of(*ends: tuple[float, int, float]) -> SampleLog:
    """Requests that arrive at 0, 1, 2, … and end after a while in a way."""
    log = SampleLog()
    samples = [log.begin(float(i)) for i in range(len(ends))]
    for sample, (seconds, outcome, _) in zip(samples, ends, strict=True):
        log.finish(sample, outcome, sample.started + seconds)
    return log


def test_ends_of_all_kinds():
    log = log_of((2.0, ANSWERED, 0), (1.0, FAILED, 0), (3.0, LEFT, 0), (9.0, DROPPED, 0))
    view = log.view("e2e", 0, 100.0)
    assert values(view.at_least) == [2.0, math.inf, 3.0]
    assert values(view.at_most) == [2.0, math.inf]
    assert values(view.left) == [3.0]
    errors = log.view("error", 0, 100.0)
    assert values(errors.at_least) == [0.0, 1.0, 0.0]
    assert values(errors.at_most) == [0.0, 1.0]
    assert log.counts(0) == {"answered": 1, "failed": 1, "client_left": 1, "refused": 1, "open": 0}


def test_fast_answers_do_not_count_before_the_slow_ones_that_came_first():
    log = SampleLog()
    slow, fast = log.begin(0.0), log.begin(1.0)
    log.finish(fast, ANSWERED, 2.0)
    view = log.view("e2e", 0, 0.5 + 0.4)
    assert values(view.at_most) == []
    assert values(log.view("e2e", 0, 5.0).at_most) == [math.inf, 1.0]  # older than any answer: it may hang
    assert values(log.view("e2e", 0, 5.0).at_least) == [5.0, 1.0]
    assert values(log.view("error", 0, 5.0).at_least) == [0.0, 0.0]
    assert values(log.view("error", 0, 5.0).at_most) == [1.0, 0.0]
    log.finish(slow, ANSWERED, 7.0)
    assert values(log.view("e2e", 0, 9.0).at_most) == [7.0, 1.0]


def test_a_first_token_is_known_while_the_answer_goes_on():
    log = SampleLog()
    sample = log.begin(1.0)
    sample.first_token(1.5)
    sample.first_token(9.0)
    assert values(log.view("ttft", 0, 10.0).at_most) == [0.5]
    assert values(log.view("e2e", 0, 10.0).at_least) == [9.0]
    log.finish(sample, FAILED, 11.0)
    assert values(log.view("ttft", 0, 12.0).at_least) == [0.5]
    assert values(log.view("e2e", 0, 12.0).at_least) == [math.inf]


def test_time_in_which_the_client_does_not_read_is_not_held_against_the_server():
    log = SampleLog()
    sample = log.begin(0.0)
    sample.block(2.0)
    assert sample.age(50.0) == 2.0
    sample.unblock(50.0)
    assert sample.age(51.0) == 3.0
    sample.block(51.0)
    log.finish(sample, ANSWERED, 90.0)
    assert values(log.view("e2e", 0, 100.0).at_least) == [3.0]


def test_an_end_counts_once_and_only_for_a_request_of_the_log():
    log = SampleLog()
    sample = log.begin(0.0)
    assert log.finish(sample, FAILED, 1.0)
    assert not log.finish(sample, ANSWERED, 2.0)
    assert not log.finish(Sample(-1, 0.0), ANSWERED, 2.0)
    assert values(log.view("error", 0, 3.0).at_least) == [1.0]


def test_indices_stay_when_old_requests_are_forgotten():
    log = SampleLog()
    opened = log.begin(0.0)
    for i in range(1, 5000):
        log.finish(log.begin(float(i)), ANSWERED, i + float(i))
    log.forget_before(4990)
    assert log.end == 5000
    view = log.view("e2e", 4990, 6000.0)
    assert values(view.at_least) == [float(i) for i in range(4990, 5000)]
    assert view.at_least.since(4997).tolist() == [4997.0, 4998.0, 4999.0]
    assert log.finish(opened, ANSWERED, 6000.0)  # forgotten, but it still counts as one that ended
    assert log.view("e2e", 4990, 6000.0).at_least.since(0).tolist() == view.at_least.since(0).tolist()
