import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chairlift.api.errors import APIError
from chairlift.api.schema import ChatBody, CompletionBody, parse
from chairlift.scheduling.sampling_params import SamplingParams

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def refused(model: type[CompletionBody] | type[ChatBody], body: object) -> tuple[str | None, str | None, str]:
    with pytest.raises(APIError) as caught:
        parse(model, body)
    error = caught.value
    assert error.status == 400
    assert len(error.message) < 300
    return error.param, error.code, error.message


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt: object, parsed: object) -> None:
    assert parse(CompletionBody, COMPLETION | {"prompt": prompt}).prompt == parsed


@pytest.mark.parametrize(
    "prompt", [None, 1, [], {}, True, [True], ["a", 1], [1, "a"], [1.0], [[1], "a"], [["a"]], [None]]
)
def test_other_forms_of_a_prompt_are_refused(prompt: object) -> None:
    param, _, message = refused(CompletionBody, COMPLETION | {"prompt": prompt})
    assert param == "prompt"
    assert "list of token ids" in message


def test_every_sampling_field_arrives() -> None:
    body = COMPLETION | {
        "n": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -5, "stop": ["x", "y"],
        "stop_token_ids": [4, 5], "ignore_eos": True, "min_tokens": 2, "presence_penalty": -0.5,
        "frequency_penalty": 1.5, "repetition_penalty": 1.25, "logit_bias": {"7": -3, "0": 0.5},
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 2, "prompt_logprobs": 4,
    }  # fmt: skip
    assert parse(CompletionBody, body).sampling_params(max_tokens=9) == SamplingParams(
        n=3, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=-5, stop=("x", "y"), stop_token_ids=(4, 5),
        ignore_eos=True, max_tokens=9, min_tokens=2, presence_penalty=-0.5, frequency_penalty=1.5,
        repetition_penalty=1.25, logit_bias={7: -3.0, 0: 0.5}, include_stop_str_in_output=True,
        skip_special_tokens=False, logprobs=2, prompt_logprobs=4,
    )  # fmt: skip


def test_absent_and_null_fields_take_the_defaults_of_the_api() -> None:
    names = (
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream",
        "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "best_of", "echo",
        "include_stop_str_in_output", "skip_special_tokens", "return_token_ids", "logprobs", "prompt_logprobs",
    )  # fmt: skip
    expected = SamplingParams(n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=9)
    assert parse(CompletionBody, COMPLETION).sampling_params(max_tokens=9) == expected
    assert parse(CompletionBody, COMPLETION | dict.fromkeys(names)).sampling_params(max_tokens=9) == expected


def test_zero_is_not_taken_for_absent() -> None:
    assert parse(ChatBody, CHAT | {"temperature": 0}).sampling_params(max_tokens=1).greedy


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [-0.1, 2.1, math.nan, math.inf, "1", True, [], {}])
def test_numbers_out_of_range_or_of_another_type(field: str, value: object) -> None:
    param, code, message = refused(ChatBody, CHAT | {field: value})
    assert (param, code) == (field, "invalid_value")
    assert message.startswith(f"{field} should be ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", 1.5), ("n", "1"), ("n", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"),
        ("top_p", 0), ("top_k", -2), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 0.5),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["a", 1]), ("stop", 5), ("stop", ["a"] * 17), ("stop", "x" * 1025),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [1] * 257), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("stream", "true"), ("model", 5), ("model", None), ("priority", 2**40),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("model", "body"), [(CompletionBody, COMPLETION), (ChatBody, CHAT)])
def test_bad_values_are_refused_by_name(model: Any, body: dict[str, Any], field: str, value: object) -> None:
    param, _, message = refused(model, body | {field: value})
    assert param is not None
    assert param.partition("[")[0] == field
    assert message.startswith(field)


def test_chat_max_completion_tokens_must_be_positive() -> None:
    assert refused(ChatBody, CHAT | {"max_completion_tokens": 0})[0] == "max_completion_tokens"


@pytest.mark.parametrize("body", [None, [], "text", 5, True])
def test_a_body_that_is_no_object(body: object) -> None:
    param, _, message = refused(CompletionBody, body)
    assert param is None
    assert "JSON object" in message


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_required_fields(field: str) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != field}
    assert refused(CompletionBody, body) == (field, "missing_required_parameter", f"{field} is required")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True), ("guided_decoding_backend", "outlines"), ("bad_words", ["a"]), ("allowed_token_ids", [5]),
        ("use_beam_search", True), ("length_penalty", 0.5), ("truncate_prompt_tokens", 5), ("detokenize", False),
        ("spaces_between_special_tokens", False), ("return_tokens_as_token_ids", True), ("logits_processors", ["a"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("model", "body"), [(CompletionBody, COMPLETION), (ChatBody, CHAT)])
def test_what_is_not_supported_is_refused_by_name(model: Any, body: dict[str, Any], field: str, value: object) -> None:
    expected = (field, "unsupported_parameter", f"{field} is not supported yet; leave it out")
    assert refused(model, body | {field: value}) == expected


def test_what_only_one_endpoint_would_support() -> None:
    assert refused(CompletionBody, COMPLETION | {"suffix": "x"})[:2] == ("suffix", "unsupported_parameter")
    assert refused(ChatBody, CHAT | {"web_search_options": {}})[:2] == ("web_search_options", "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
def test_fields_of_completions_that_do_not_fit(fields: dict[str, Any], param: str) -> None:
    assert refused(CompletionBody, COMPLETION | fields)[0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"echo": 5, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_fields_of_chat_that_do_not_fit(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatBody, CHAT | fields)[0] == param


@pytest.mark.parametrize(
    "bias",
    [{"-1": 1}, {"x": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": None}, {"٣": 1}, {"5" * 50: 1}, {"": 1}, [5], 5,
     {str(i): 1 for i in range(1025)}, {"5": math.nan}, {" 5": 1}, {"5.0": 1}],
)  # fmt: skip
def test_a_bias_that_is_none(bias: object) -> None:
    param, _, message = refused(CompletionBody, COMPLETION | {"logit_bias": bias})
    assert param == "logit_bias"
    assert "token ids" in message


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(APIError) as caught:
        parse(ChatBody, CHAT | {"min_tokens": 5}).sampling_params(max_tokens=4)
    assert caught.value.param == "min_tokens"
    assert parse(ChatBody, CHAT | {"min_tokens": 5}).sampling_params(max_tokens=None).min_tokens == 5


def test_how_many_logprobs_are_asked_for() -> None:
    def asked(model: Any, fields: dict[str, Any]) -> tuple[int | None, int | None]:
        params = parse(model, fields).sampling_params(max_tokens=5)
        return params.logprobs, params.prompt_logprobs

    assert asked(CompletionBody, COMPLETION) == (None, None)
    assert asked(CompletionBody, COMPLETION | {"logprobs": False}) == (None, None)
    assert asked(CompletionBody, COMPLETION | {"logprobs": 0}) == (0, None)
    assert asked(CompletionBody, COMPLETION | {"logprobs": 3, "echo": True}) == (3, 3)
    assert asked(CompletionBody, COMPLETION | {"logprobs": 3, "echo": True, "prompt_logprobs": 5}) == (3, 5)
    assert asked(CompletionBody, COMPLETION | {"prompt_logprobs": 0}) == (None, 0)
    assert asked(CompletionBody, COMPLETION | {"best_of": 2}) == (0, None)
    assert asked(ChatBody, CHAT | {"logprobs": True}) == (0, None)
    assert asked(ChatBody, CHAT | {"logprobs": True, "top_logprobs": 20}) == (20, None)
    assert asked(ChatBody, CHAT | {"top_logprobs": 0}) == (None, None)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    neutral = {
        "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "response_format": {"type": "text"}, "store": False, "user": "someone", "metadata": {"a": "b"},
        "service_tier": "auto",
    }  # fmt: skip
    parse(CompletionBody, COMPLETION | neutral | {"echo": False, "best_of": 1, "suffix": None})
    parse(
        ChatBody, CHAT | neutral | {"logprobs": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    )


def test_stream_options() -> None:
    assert parse(ChatBody, CHAT | {"stream": True, "stream_options": {"include_usage": True}}).include_usage
    assert not parse(ChatBody, CHAT | {"stream": True, "stream_options": {}}).include_usage
    assert not parse(ChatBody, CHAT | {"stream": True, "stream_options": None}).include_usage
    param, _, message = refused(ChatBody, CHAT | {"stream_options": {"include_usage": True}})
    assert param == "stream_options"
    assert "stream: true" in message
    body = CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not parse(ChatBody, body).continuous_usage
    body["stream_options"]["include_usage"] = True
    assert parse(ChatBody, body).continuous_usage
    assert not parse(ChatBody, CHAT | {"stream": True, "stream_options": {"include_usage": True}}).continuous_usage


def test_content_of_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse(ChatBody, CHAT | {"messages": [{"role": "user", "content": c} for c in ("ab", parts, None, [])]})
    assert [message.text for message in body.messages] == ["ab", "ab", "", ""]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[1].role"),
        ({"role": "pilot", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ("x", "messages[1]"),
    ],
)
def test_bad_messages_are_refused_by_their_place(message: object, param: str) -> None:
    assert refused(ChatBody, CHAT | {"messages": [CHAT["messages"][0], message]})[0] == param


@pytest.mark.parametrize("messages", [[], None, "x", {}])
def test_messages_must_be_a_list_of_some(messages: object) -> None:
    assert refused(ChatBody, CHAT | {"messages": messages})[0] == "messages"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, CHAT | {"messages": [1] * 1000}),
        (ChatBody, CHAT | {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (CompletionBody, COMPLETION | {"stop": [1] * 1000}),
    ],
)
def test_the_first_of_many_mistakes_is_enough(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A body of megabytes has room for a million, and explaining them all would stop every stream for seconds."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1


def test_the_salt_of_the_prefix_cache() -> None:
    assert parse(CompletionBody, COMPLETION | {"cache_salt": "mine"}).cache_salt == "mine"
    for salt in ("", "x" * 257, 5):
        assert refused(ChatBody, CHAT | {"cache_salt": salt})[0] == "cache_salt"
