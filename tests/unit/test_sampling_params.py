"""Values that a request cannot have are refused when it is made."""

import pickle
from typing import Any

import pytest

from chairlift.scheduling.sampling_params import SamplingParams, StructuredSpec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.0), ("max_tokens", -1), ("max_tokens", 2.5), ("max_tokens", float("nan")), ("top_k", -2),
        ("top_k", 1.5), ("top_k", "5"), ("seed", 0.5), ("seed", 2**64), ("temperature", float("nan")),
        ("temperature", -0.1), ("top_p", float("nan")), ("top_p", 0), ("min_p", float("nan")), ("min_p", 1.1),
        ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", 1.0), ("logprobs", -1), ("logprobs", 1.5),
        ("prompt_logprobs", -1), ("presence_penalty", 2.1), ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")), ("logit_bias", {-1: 0}), ("logit_bias", {2**31: 0}),
        ("logit_bias", {"5": 0}), ("logit_bias", {True: 0}), ("logit_bias", {5: 100.1}), ("logit_bias", {5: None}),
        ("logit_bias", {5: float("nan")}),
    ],
)  # fmt: skip
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must "):
        SamplingParams(**{field: value})


def test_a_bias_cannot_be_changed_from_outside_and_travels() -> None:
    given = {5: 1.0, 7: -100}
    params = SamplingParams(logit_bias=given, structured=StructuredSpec("regex", "a+"))
    given[5] = 2.0
    assert params.logit_bias == {5: 1.0, 7: -100}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 3.0  # type: ignore[index]
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(logit_bias={7: -100, 5: 1.0}, structured=params.structured))
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="structured must be one of"):
        StructuredSpec("poem")


@pytest.mark.parametrize(
    ("params", "adjusts"),
    [
        (SamplingParams(temperature=0.5, top_p=0.5, top_k=5, min_p=0.1, logprobs=3), False),
        (SamplingParams(presence_penalty=-1), True),
        (SamplingParams(frequency_penalty=1), True),
        (SamplingParams(repetition_penalty=0.5), True),
        (SamplingParams(logit_bias={1: 1}), True),
        (SamplingParams(min_tokens=1), True),
    ],
)
def test_what_adjusts_logits(params: SamplingParams, adjusts: bool) -> None:
    assert params.adjusts_logits is adjusts
