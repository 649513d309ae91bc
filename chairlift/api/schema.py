"""The bodies of the OpenAI API, checked field by field, and how they become :class:`SamplingParams`.

Three kinds of field are told apart. Those that are modelled have a type and a range. Those of the API that the engine
does not have are taken where they ask for nothing (null, or the value that changes nothing) and refused by name
otherwise, because an answer that silently ignores them is wrong. Those that cannot change the answer are ignored.
Anything else is unknown, most likely a misspelling, and refused.

https://platform.openai.com/docs/api-reference; the fields that are vLLM's own have its names and meanings.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from chairlift.api.errors import APIError, bad_request, shown
from chairlift.api.fields import Body, Unsupported
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
COMPLETION_MAX_TOKENS = 16
TEMPLATE_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})

B = TypeVar("B", bound="Body")


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


class StreamOptions(Body):
    """What a stream carries beside the text."""

    unsupported: ClassVar[Unsupported] = {"continuous_usage_stats": (False,)}
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(
        None, description="End the stream with a chunk that has the usage and no choice."
    )


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    unsupported: ClassVar[Unsupported] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "prompt_logprobs": (),
        "min_tokens": (0,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "response_format": ({"type": "text"},),
        "store": (False,),
    }
    ignored = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})

    model: str = Field(description="A name that the server serves; GET /v1/models lists them.")
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Completions of each prompt.")
    max_tokens: int | None = Field(None, ge=1, description="The most tokens to generate for each choice.")
    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="0 takes the most likely token. Default: 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Sample from this share of the probability. Default: 1.")
    top_k: int | None = Field(None, ge=-1, description="Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest."
    )
    seed: int | None = Field(
        None, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS, description="Makes sampling repeatable."
    )
    stop: StopStrings | None = Field(None, description="Strings that end the text; they are not part of it.")
    stop_token_ids: list[int] | None = Field(
        None, max_length=MAX_STOP_TOKENS, fail_fast=True, description="Tokens that end the text."
    )
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-sequence token.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="For the priority policy; lower goes first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same salt share computed prompts."
    )

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "is only for stream: true; set that or leave it out", {"field": "stream_options"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def requested_max_tokens(self) -> int | None:
        """How many tokens the client wants at most, if it says so."""
        return self.max_tokens

    def sampling_params(self, *, max_tokens: int | None) -> SamplingParams:
        """Returns what the sampler is asked, with the API's defaults where the body says nothing."""
        return SamplingParams(
            n=_or(self.n, 1),
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, 0),
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    unsupported: ClassVar[Unsupported] = GenerationBody.unsupported | {"best_of": (1,), "echo": (False,), "suffix": ()}

    prompt: Annotated[
        list[TextOrTokens],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ] = Field(description="A text, token ids, or a list of either, which gives n choices for each item in order.")
    add_special_tokens: bool | None = Field(None, description="Begin a text with the model's BOS token. Default: true.")


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessageBody(Body):
    """One message of a conversation."""

    unsupported: ClassVar[Unsupported] = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()}
    ignored = frozenset({"name", "annotations"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            list[TextPart],
            Field(fail_fast=True),
            BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
        ]
        | None
    ) = Field(None, description="The text, whole or in parts.")
    tool_call_id: str | None = Field(None, description="For the role tool: the call that this answers.")

    @model_validator(mode="after")
    def _has_content(self) -> MessageBody:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise PydanticCustomError(
                "unsupported", "is missing: a message of this role needs one", {"field": "content"}
            )
        return self

    @property
    def text(self) -> str:
        """The content as one string; null is empty, and parts are joined."""
        return "".join(part.text for part in self.content or ())


class ChatBody(GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    unsupported: ClassVar[Unsupported] = GenerationBody.unsupported | {
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "continue_final_message": (False,),
    }
    ignored = GenerationBody.ignored | {"parallel_tool_calls"}

    messages: list[MessageBody] = Field(min_length=1, fail_fast=True, description="The conversation so far.")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens, which it overrides. Default: up to the model's length."
    )
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the assistant's turn begun.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := TEMPLATE_VARIABLES & (value or {}).keys():
            raise PydanticCustomError("reserved", f"should not set {min(reserved)}, which the request's own fields do")
        return value

    @property
    def requested_max_tokens(self) -> int | None:
        """How many tokens the client wants at most, if it says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _or(value: Any, default: Any) -> Any:
    """``value``, unless it is null: 0 counts as given."""
    return default if value is None else value


def parse(model: type[B], data: object) -> B:
    """Checks a decoded JSON body.

    Raises:
        APIError: 400 about the first field that is wrong.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(model, error.errors(include_url=False)[0]) from None


def _explain(model: type[Body], error: ErrorDetails) -> APIError:
    """Says what to change, from what pydantic says is wrong."""
    context = error.get("ctx", {})
    field = (context["field"],) if error["type"] == "unsupported" else ()
    param = _path((*error["loc"], *field))
    match error["type"]:
        case "unsupported":
            return bad_request(f"{param} {error['msg']}", param, code="unsupported_parameter")
        case "extra_forbidden":
            names = [*model.model_fields, *model.unsupported, *model.ignored]
            close = get_close_matches(str(error["loc"][-1])[:64], names, n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            return bad_request(f"unknown field {param}: {hint}", param, code="unknown_parameter")
        case "missing":
            return bad_request(f"{param} is required", param, code="missing_required_parameter")
        case "model_type":
            what = "should be a JSON object"
        case _:
            what = "should " + error["msg"].partition("hould ")[2].replace(" after validation", "")
    return bad_request(
        f"{param or 'the body'} {what}, got {shown(error['input'])}", param or None, code="invalid_value"
    )


def _path(loc: tuple[int | str, ...]) -> str:
    """Writes a path as ``messages[0].content``, within bounds whatever the client called its fields."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in loc)
    return path.removeprefix(".")
