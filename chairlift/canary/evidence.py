"""How strongly outcomes speak against a claim about their rate, at any moment one cares to look.

Each gate is a claim about how often something happens: ``error_rate<1%`` says that a request fails with a probability
below 0.01, and ``p99_e2e<5s`` that it takes longer than 5 s with a probability below 0.01. Nothing is assumed about how
latencies are distributed.

Let k of n outcomes be bad. For an odds multiple m, ::

    L_m = m^k / (1 + (m − 1) p0)^n

is the likelihood of k under the rate whose odds are m times those of p0, over that under p0. One more outcome that is
bad with probability p multiplies L_m by (1 + (m − 1) p) / (1 + (m − 1) p0) on average. That is at most 1 for all m > 1
if p ≤ p0, and for all m < 1 if p ≥ p0. So, while the rate is at most p0, every mean of L_m over m > 1 is a nonnegative
supermartingale that starts at 1. By Ville's inequality it *ever* reaches 1/alpha with a probability of at most alpha
(Howard, Ramdas, McAuliffe and Sekhon, *Time-uniform, nonparametric, nonasymptotic confidence sequences*, 2021).
Hence one may look after every outcome, and stop whenever one likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ABOVE = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
BELOW = (0.0, 0.1, 0.3, 0.6)


def evidence_above(bad: int, n: int, rate: float) -> float:
    """Returns the logarithm of the evidence that outcomes are bad more often than ``rate``, ``bad`` of ``n`` being so.

    Args:
        bad: at least 0, at most ``n``.
        n: outcomes seen.
        rate: between 0 and 1, both excluded.
    """
    return _log_mean([bad * math.log(m) - n * math.log1p((m - 1) * rate) for m in ABOVE])


def evidence_below(bad: int, n: int, rate: float) -> float:
    """Returns the logarithm of the evidence that outcomes are bad less often than ``rate``."""
    return _log_mean([_power(m, bad) - n * math.log1p((m - 1) * rate) for m in BELOW])


@lru_cache(maxsize=1 << 14)
def fewest_above(n: int, rate: float, alpha: float) -> int:
    """Returns how many of ``n`` must be bad to show, but for ``alpha``, a rate above ``rate``; n + 1 if none would."""
    low, high = 0, n + 1
    while low < high:
        middle = (low + high) // 2
        if evidence_above(middle, n, rate) >= -math.log(alpha):
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=1 << 14)
def most_below(n: int, rate: float, alpha: float) -> int:
    """Returns how many of ``n`` may be bad and still show, but for ``alpha``, a rate below ``rate``; −1 if none may."""
    low, high = -1, n
    while low < high:
        middle = (low + high + 1) // 2
        if evidence_below(middle, n, rate) >= -math.log(alpha):
            low = middle
        else:
            high = middle - 1
    return low


def rate_bounds(bad: int, n: int, alpha: float) -> tuple[float, float]:
    """Returns the lowest and highest rate that ``bad`` of ``n`` leave possible, each but for ``alpha``."""
    threshold = -math.log(alpha)
    lower = _bisect(lambda rate: evidence_above(bad, n, rate) < threshold)
    upper = _bisect(lambda rate: evidence_below(bad, n, rate) >= threshold)
    return (lower if bad else 0.0), upper


def quantile_at_least(values: NDArray[np.float64], share_above: float, alpha: float) -> float:
    """Returns what the quantile is at least, but for ``alpha``; 0 if nothing can be said.

    With q the true quantile, values exceed q with a probability of ``share_above`` at most. If the bound, which is the
    k-th largest value, were above q, k values would exceed q, and k is the number that refutes that probability.

    Args:
        values: [n], at least 0; of some of them it may only be known that they are as large or larger.
        share_above: 0.01 for P99.
        alpha: probability of being wrong, ever, over all n.
    """
    k = fewest_above(len(values), share_above, alpha)
    return float(np.partition(values, len(values) - k)[len(values) - k]) if k <= len(values) else 0.0


def quantile_at_most(values: NDArray[np.float64], share_above: float, alpha: float) -> float:
    """Returns what the quantile is at most, but for ``alpha``; infinity if nothing can be said.

    Args:
        values: [n], at least 0; some of them may be smaller than they are said to be.
        share_above: 0.01 for P99.
        alpha: probability of being wrong, ever, over all n.
    """
    k = most_below(len(values), share_above, alpha)
    if k < 0 or k >= len(values):
        return math.inf
    return float(np.partition(values, len(values) - k - 1)[len(values) - k - 1])


def spent(number: int, patience: int) -> float:
    """Returns the share of a budget that its ``number``-th user (from 1 on) may spend; the shares sum to 1.

    The ``patience`` first ones get about equal shares, later ones less and less: J / ((J + j)(J + j − 1)).
    """
    return patience / ((patience + number) * (patience + number - 1))


def _power(base: float, exponent: int) -> float:
    if base == 0.0:
        return -math.inf if exponent else 0.0
    return exponent * math.log(base)


def _log_mean(logs: list[float]) -> float:
    largest = max(logs)
    return largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))


def _bisect(above: Callable[[float], bool]) -> float:
    """The rate from which on ``above`` holds, to about one part in a million."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        if above(middle):
            high = middle
        else:
            low = middle
    return high
