"""Types of fields that are more than a number or a text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from chairlift.scheduling.sampling_params import MAX_BIAS

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_DIGITS = 10


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


TextOrTokens = str | list[int]


def _prompts(value: object) -> list[TextOrTokens]:
    """Takes the four forms of a prompt apart; by hand, because they can be long and a union's errors are unreadable."""
    if isinstance(value, str) or (isinstance(value, list) and value and _all_ints(value)):
        return [value]
    if (
        isinstance(value, list)
        and value
        and (all(type(item) is str for item in value) or all(type(item) is list and _all_ints(item) for item in value))
    ):
        return value
    raise PydanticCustomError(
        "prompt", "should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _all_ints(items: list[object]) -> bool:
    return all(type(item) is int for item in items)


def _biases(value: object) -> dict[int, float]:
    """Takes token ids as JSON has to write them; by hand, because a strict integer is no string."""
    wrong = PydanticCustomError(
        "biases", f"should be an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100"
    )
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong
    biases = {}
    for name, bias in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS):
            raise wrong
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise wrong
        biases[int(name)] = float(bias)
    return biases


def _count_or_false(value: object) -> object:
    return None if value is False else value


LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
LogprobCountOrFalse = Annotated[LogprobCount | None, BeforeValidator(_count_or_false)]
Biases = Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])]
Prompts = Annotated[
    list[TextOrTokens],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
