"""How often whole rollouts go wrong: a thousand of each kind, under a virtual clock, at the edge of the gates."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from chairlift.canary.config import CanaryConfig
from chairlift.canary.gates import parse_gates
from chairlift.canary.judge import Judge
from chairlift.canary.samples import ANSWERED, FAILED, SampleLog
from chairlift.canary.simulate import Behaviour, lognormal, simulate_rollout

RUNS = 1000
BOUND = 0.05
SIGMA = 0.4
P80 = 0.8416212335729143  # of the standard normal


def config(gates: str, **more) -> CanaryConfig:
    settings = {"steps": (0.5, 1.0), "hold": 60.0, "window": 60.0, "false_rollback": BOUND, "false_pass": BOUND}
    return CanaryConfig(stable="http://a", candidate="http://b", gates=parse_gates(gates), **{**settings, **more})


def phases(settings: CanaryConfig, stable: Behaviour, candidate: Behaviour, runs: int, **more) -> Counter[str]:
    simulation = {"rate": 3.0, "duration": 150.0, "tick": 5.0, **more}
    return Counter(simulate_rollout(settings, stable, candidate, seed=seed, **simulation).phase for seed in range(runs))


def slack(runs: int) -> float:
    """Three standard errors."""
    return 3 * math.sqrt(BOUND * (1 - BOUND) / runs)


def test_a_candidate_at_the_very_edge_of_its_gates_is_rolled_back_no_more_often_than_stated():
    """The worst that keeps to a gate: it holds with equality. That evidence is weighed as tightly as it is said to be
    stands in test_canary_evidence.py; here are the windows, the requests that are open, and all looks of a rollout.
    """
    edge = lognormal(2.0 / math.exp(SIGMA * P80), SIGMA)
    got = phases(config("p80_e2e<2s", steps=(1.0,)), edge, edge, RUNS, rate=5.0, duration=120.0)
    assert got["rolled_back"] <= RUNS * BOUND, got
    assert got["complete"] <= RUNS * (BOUND + slack(RUNS)), got
    worse = lognormal(1.3 * 2.0 / math.exp(SIGMA * P80), SIGMA)
    got = phases(config("p80_e2e<2s", steps=(1.0,)), edge, worse, 40, rate=5.0, duration=120.0)
    assert got["rolled_back"] >= 38, got


def test_a_candidate_as_good_as_stable_is_rolled_back_no_more_often_than_stated():
    same = lognormal(0.5, SIGMA, error_rate=0.01)
    got = phases(config("error_rate<2%,vs_stable.p90_e2e<1"), same, same, RUNS)
    assert got["rolled_back"] <= RUNS * BOUND, got


def test_that_failures_are_known_before_successes_does_not_decide():
    """Failed requests end at once and the others after 20 s: the first outcomes known are all bad."""
    runs, error_rate = 200, 0.05
    rolled_back = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        log = SampleLog()
        judge = Judge(
            parse_gates("error_rate<5%"), log, SampleLog(), window=60, min_samples=1, false_rollback=BOUND,
            false_pass=BOUND,
        )  # fmt: skip
        judge.begin_rollout(0.0)
        open_samples = []
        for second in range(100):
            for _ in range(5):
                sample = log.begin(float(second))
                if rng.random() < error_rate:
                    log.finish(sample, FAILED, second + 0.01)
                else:
                    open_samples.append(sample)
            while open_samples and open_samples[0].started + 20 <= second:
                log.finish(open_samples.pop(0), ANSWERED, float(second))
            if judge.read(second + 0.5, compare=False)[0].verdict == "fail":
                rolled_back += 1
                break
    assert rolled_back <= runs * (BOUND + slack(runs))


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("slow", lognormal(2.0, SIGMA)),
        ("failing", lognormal(0.5, SIGMA, error_rate=0.15)),
        ("hanging", lambda rng, n, _: (np.full(n, 1e6), 0.0)),
        (
            "dying at the second step",
            lambda rng, n, now: (0.3 * np.exp(SIGMA * rng.standard_normal(n)), float(now > 70)),
        ),
    ],
)
def test_a_bad_candidate_is_rolled_back_within_a_window(name: str, candidate: Behaviour):
    settings = config("p95_e2e<2s,error_rate<2%")
    for seed in range(20):
        outcome = simulate_rollout(settings, lognormal(0.5, SIGMA), candidate, rate=10, duration=300, seed=seed)
        assert outcome.phase == "rolled_back", name
        assert outcome.seconds <= (130 if "dying" in name else 60), name


def test_a_much_better_candidate_goes_all_the_way():
    settings = config("p95_e2e<2s,error_rate<2%,vs_stable.p95_e2e<1.1")
    got = phases(settings, lognormal(1.5, SIGMA), lognormal(0.5, SIGMA), 20, rate=20.0, duration=240.0)
    assert got == {"complete": 20}
