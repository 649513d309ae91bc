"""The statistics: against exact sums, and for how often they err."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.canary.evidence import (
    evidence_above,
    evidence_below,
    fewest_above,
    most_below,
    quantile_at_least,
    quantile_at_most,
    rate_bounds,
    spent,
)

rates = st.floats(0.001, 0.6)
alphas = st.sampled_from([0.3, 0.05, 0.001])


def mean_evidence(evidence, n: int, p: float, rate: float) -> float:
    """E[exp(evidence)] of n outcomes that are bad with probability p."""
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) * math.exp(evidence(k, n, rate)) for k in range(n + 1))


@given(rate=rates, factor=st.floats(0.0, 1.0), n=st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_evidence_is_at_most_1_on_average_where_the_claim_holds(rate: float, factor: float, n: int):
    assert mean_evidence(evidence_above, n, factor * rate, rate) <= 1 + 1e-9
    assert mean_evidence(evidence_below, n, rate + factor * (1 - rate), rate) <= 1 + 1e-9
    assert mean_evidence(evidence_above, n, rate, rate) == pytest.approx(1)
    assert mean_evidence(evidence_below, n, rate, rate) == pytest.approx(1)


@given(rate=rates, n=st.integers(0, 400), alpha=alphas)
@settings(max_examples=80, deadline=None)
def test_critical_counts_are_the_first_and_last_that_convince(rate: float, n: int, alpha: float):
    k = fewest_above(n, rate, alpha)
    assert k == n + 1 or evidence_above(k, n, rate) >= -math.log(alpha)
    assert k == 0 or evidence_above(k - 1, n, rate) < -math.log(alpha)
    k = most_below(n, rate, alpha)
    assert k == -1 or evidence_below(k, n, rate) >= -math.log(alpha)
    assert k == n or evidence_below(k + 1, n, rate) < -math.log(alpha)


@given(rate=rates, n=st.integers(1, 500), bad=st.integers(0, 500))
@settings(max_examples=80, deadline=None)
def test_as_few_as_allowed_are_never_evidence_of_more(rate: float, n: int, bad: int):
    """The judge spares itself the sums where this holds."""
    bad = min(bad, n)
    if bad <= n * rate:
        assert evidence_above(bad, n, rate) <= 1e-9
    if bad >= n * rate:
        assert evidence_below(bad, n, rate) <= 1e-9


@given(n=st.integers(1, 300), bad=st.integers(0, 300), alpha=alphas)
@settings(max_examples=60, deadline=None)
def test_rate_bounds_hold_the_estimate_between_them(n: int, bad: int, alpha: float):
    bad = min(bad, n)
    low, high = rate_bounds(bad, n, alpha)
    assert 0 <= low <= bad / n <= high <= 1


def runs_that_ever(critical_count, p: float, runs: int, n: int) -> tuple[float, float]:
    """The shares of runs in which as many, and as few, are ever bad as the critical count of that moment."""
    rng = np.random.default_rng(7)
    bad = np.cumsum(rng.random((runs, n)) < p, axis=1)
    critical = np.array([critical_count(i) for i in range(1, n + 1)])
    return float((bad >= critical).any(axis=1).mean()), float((bad <= critical).any(axis=1).mean())


@pytest.mark.parametrize("p", [0.01, 0.1])
def test_looking_after_each_of_many_outcomes_errs_no_more_often_than_stated(p: float):
    alpha, runs, n = 0.05, 2000, 1500
    above = runs_that_ever(lambda i: fewest_above(i, p, alpha), p, runs, n)[0]
    below = runs_that_ever(lambda i: most_below(i, p, alpha), p, runs, n)[1]
    slack = 3 * math.sqrt(alpha * (1 - alpha) / runs)
    assert 0 < above <= alpha + slack
    assert 0 < below <= alpha + slack


def test_looking_as_often_with_a_bound_for_one_look_would_err_far_more_often():
    """What the test above would see of a method that is not valid at any time."""
    alpha, p, n = 0.05, 0.1, 1500

    def clopper_pearson(i: int) -> int:
        tail, k = 0.0, i + 1
        while k > 0:
            log_pmf = math.lgamma(i + 1) - math.lgamma(k) - math.lgamma(i - k + 2)
            pmf = math.exp(log_pmf + (k - 1) * math.log(p) + (i - k + 1) * math.log1p(-p))
            if tail + pmf > alpha:
                return k
            tail, k = tail + pmf, k - 1
        return 0

    assert runs_that_ever(clopper_pearson, p, 500, n)[0] > 4 * alpha


def test_quantile_bounds_cover_the_quantile_of_any_distribution():
    rng = np.random.default_rng(3)
    alpha, runs = 0.05, 400
    for draw, quantile in (
        (lambda: rng.exponential(1.0, 700), -math.log(0.05)),
        (lambda: rng.standard_cauchy(700) ** 2, math.tan(math.pi * 0.475) ** 2),
        (lambda: rng.integers(0, 3, 700).astype(float), 2.0),  # ties
    ):
        wrong_low = wrong_high = 0
        for _ in range(runs):
            values = draw()
            wrong_low += any(quantile_at_least(values[:n], 0.05, alpha) > quantile for n in (50, 200, 700))
            wrong_high += any(quantile_at_most(values[:n], 0.05, alpha) < quantile for n in (50, 200, 700))
        assert max(wrong_low, wrong_high) <= runs * (alpha + 3 * math.sqrt(alpha * (1 - alpha) / runs))


def test_quantile_bounds_say_something_and_close_in():
    rng = np.random.default_rng(3)
    values = rng.exponential(1.0, 20_000)
    true = -math.log(0.01)
    assert quantile_at_least(values[:1], 0.01, 0.01) == 0.0
    assert quantile_at_most(values[:300], 0.01, 0.01) == math.inf
    widths = [
        quantile_at_most(values[:n], 0.01, 0.01) - quantile_at_least(values[:n], 0.01, 0.01) for n in (2000, 20_000)
    ]
    assert widths[1] < widths[0] < 0.8 * true
    assert quantile_at_least(np.zeros(0), 0.01, 0.01) == 0.0
    assert quantile_at_most(np.zeros(0), 0.01, 0.01) == math.inf


@pytest.mark.parametrize("patience", [1, 10])
def test_a_budget_is_spent_at_most_once(patience: int):
    shares = [spent(number, patience) for number in range(1, 100_000)]
    assert 0.99 < sum(shares) <= 1
    assert shares == sorted(shares, reverse=True)
