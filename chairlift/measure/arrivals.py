"""When an open loop sends its requests."""

from __future__ import annotations

import math

import numpy as np

from chairlift.measure.workload import WorkloadError

RAMP_UPS = ("linear", "exponential")


def gamma_arrivals(rng: np.random.Generator, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Seconds from the start at which ``count`` requests are sent, ``rate`` a second on average.

    The gaps between them follow a gamma distribution of shape ``burstiness``, as in ``vllm bench serve``: 1 is a
    Poisson process, below 1 is burstier, above 1 more even; their coefficient of variation is ``burstiness ** -0.5``.
    They are stretched so that the last request falls on ``count / rate`` and the offered load is what was asked for,
    however few the requests are. An infinite rate sends all at 0.
    """
    _check(count, rate, burstiness)
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, 1.0, count))
    if times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]


def ramp_arrivals(
    rng: np.random.Generator, count: int, strategy: str, start_rate: float, end_rate: float, burstiness: float = 1.0
) -> list[float]:
    """The same with a rate that moves from ``start_rate`` to ``end_rate`` over the requests.

    "linear" moves it by equal differences, "exponential" by equal factors.
    """
    _check(count, start_rate, burstiness)
    if strategy not in RAMP_UPS:
        raise WorkloadError(f"the ramp-up is one of {', '.join(RAMP_UPS)}; got {strategy!r}")
    if not (0 < start_rate < math.inf and 0 < end_rate < math.inf):
        raise WorkloadError(f"a ramp-up goes from one rate above 0 to another, got {start_rate:g} and {end_rate:g}")
    share = np.linspace(0.0, 1.0, count)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * share
    else:
        rates = start_rate * (end_rate / start_rate) ** share
    return [float(time) for time in np.cumsum(rng.gamma(burstiness, 1.0 / burstiness, count) / rates)]


def _check(count: int, rate: float, burstiness: float) -> None:
    if count < 1:
        raise WorkloadError(f"there must be at least one request, got {count}")
    if not rate > 0:
        raise WorkloadError(f"the request rate must be above 0, or inf for all at once; got {rate:g}")
    if not 0 < burstiness < math.inf:
        raise WorkloadError(f"the burstiness must be above 0, got {burstiness:g}")
