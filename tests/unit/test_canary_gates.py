"""The grammar of gates, and of the other settings that are written as text."""

from __future__ import annotations

import pytest

from chairlift.canary.config import CanaryConfig, Timeouts, parse_duration, parse_steps, parse_upstream
from chairlift.canary.gates import EXAMPLE, Gate, parse_gates
from chairlift.config import ConfigError


def test_the_example_reads_as_it_is_meant():
    assert parse_gates(EXAMPLE) == (
        Gate("p99_e2e<5s", "e2e", 0.01, 5.0),
        Gate("error_rate<1%", "error", 0.01, 0.0),
        Gate("p99_ttft<1s", "ttft", 0.01, 1.0),
        Gate("vs_stable.p99_e2e<1.1", "e2e", 0.01, 1.1, relative=True),
    )


@pytest.mark.parametrize(
    ("text", "metric", "allowed", "limit"),
    [
        ("p50_ttft<250ms", "ttft", 0.5, 0.25),
        (" p99.9_e2e < 1.5m ", "e2e", 0.001, 90.0),
        ("p9_e2e<.5s", "e2e", 0.91, 0.5),
        ("error_rate<0.5%", "error", 0.005, 0.0),
    ],
)
def test_numbers_and_units(text: str, metric: str, allowed: float, limit: float):
    (gate,) = parse_gates(text)
    assert (gate.metric, gate.allowed, gate.limit) == (metric, pytest.approx(allowed), pytest.approx(limit))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty gate"),
        ("p99_e2e<5s,", "empty gate"),
        ("p99_e2e>5s", "NAME<LIMIT"),
        ("p99_e2e<=5s", "NAME<LIMIT"),
        ("p99_e2e", "NAME<LIMIT"),
        ("p99_e2e<5", "needs a unit"),
        ("p99_e2e<5%", "needs a unit"),
        ("p99_e2e<5 parsecs", "is no limit"),
        ("p99_e2e<-5s", "is no limit"),
        ("p99_e2e<nans", "is no limit"),
        ("p99_e2e<0s", "nothing is faster"),
        ("p0_e2e<5s", "no p0"),
        ("p100_e2e<5s", "there is no 'p100_e2e'"),
        ("p99_itl<5s", "there is no 'p99_itl'"),
        ("vs_stable.p99_e2e<1.1s", "bare multiple"),
        ("vs_stable.p99_e2e<0", "nothing is faster"),
        ("vs_stable.error_rate<2", "cannot be held against"),
        ("error_rate<0.01", "in percent"),
        ("error_rate<0%", "above 0%"),
        ("error_rate<100%", "below 100%"),
        ("p99_e2e<5s,p99_e2e<6s", "two gates"),
        ("error_rate<1%,error_rate<2%", "two gates"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, said: str):
    with pytest.raises(ConfigError, match="--gate") as error:
        parse_gates(text)
    assert said in str(error.value)


def test_quantiles_of_different_ranks_are_different_gates():
    assert len(parse_gates("p50_e2e<1s,p99_e2e<5s,vs_stable.p99_e2e<1.1,p99_ttft<1s")) == 4


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("1.5s", 1.5)]
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "5m?", "-5m", "1e3s"])
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


def test_steps():
    assert parse_steps("10,25,50,100") == (0.1, 0.25, 0.5, 1.0)
    assert parse_steps("0.5") == (0.005,)
    for wrong in ("", "10,10", "50,10", "0,10", "10,101", "ten", "nan", "10,,20"):
        with pytest.raises(ValueError, match=r"each step|percentages"):
            parse_steps(wrong)


def test_addresses():
    assert parse_upstream("stable", "http://a:8000/v1/") == "http://a:8000"
    assert parse_upstream("stable", "https://host/llm/v1") == "https://host/llm"
    for wrong in ("a:8000", "ftp://a", "http://", "http://a:99999", "http://a:0", "http://a/?x=1", "http://a/#x"):
        with pytest.raises(ConfigError, match="--stable"):
            parse_upstream("stable", wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidate": "http://a"},
        {"false_rollback": 0.0},
        {"false_pass": 1.0},
        {"hold": 0.0},
        {"window": -1.0},
        {"min_samples": 0},
        {"health_path": "health"},
    ],
)
def test_settings_that_cannot_work(wrong: dict):
    with pytest.raises(ConfigError, match="--"):
        CanaryConfig(**{"stable": "http://a", "candidate": "http://b", **wrong})


def test_a_timeout_of_nothing():
    with pytest.raises(ConfigError, match="--first-byte-timeout"):
        Timeouts(first_byte=0)
