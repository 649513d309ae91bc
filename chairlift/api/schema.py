"""The bodies of the OpenAI API, checked field by field, and how they become :class:`SamplingParams`.

Three kinds of field are told apart. Those that are modelled have a type and a range. Those of the API that the engine
does not have are taken where they ask for nothing (null, or the value that changes nothing) and refused by name
otherwise, because an answer that silently ignores them is wrong. Those that cannot change the answer are ignored.
Anything else is unknown, and ignored with a warning (see :mod:`chairlift.api.unknown`).

https://platform.openai.com/docs/api-reference; the fields that are vLLM's own have its names and meanings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from chairlift.api.errors import APIError, bad_request, shown
from chairlift.api.fields import Body, Unsupported
from chairlift.api.forms import Choices, JsonSchema, Pattern, ResponseFormat, StructuredOutputs, form_specs
from chairlift.api.tools import MAX_TOOLS, ToolBody, ToolCallBody, ToolChoice, ToolChoiceField, call_spec
from chairlift.api.values import Biases, LogprobCount, LogprobCountOrFalse, Prompts, StopStrings
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams, StructuredSpec

MAX_N = 128
MAX_STOP_TOKENS = 256
COMPLETION_MAX_TOKENS = 16
TEMPLATE_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})

B = TypeVar("B", bound="Body")


class StreamOptions(Body):
    """What a stream carries beside the text."""

    place = "stream_options"
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(
        None, description="End the stream with a chunk that has the usage and no choice."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk has the usage of its choice so far."
    )


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    unsupported: ClassVar[Unsupported] = {
        "spaces_between_special_tokens": (True,),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "detokenize": (True,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "return_tokens_as_token_ids": (False,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "store": (False,),
    }
    ignored = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})

    model: str = Field(description="A name that the server serves; GET /v1/models lists them.")
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Completions of each prompt.")
    max_tokens: int | None = Field(
        None, ge=0, description="The most tokens to generate for each choice; 0 with echo or prompt_logprobs only."
    )
    min_tokens: int | None = Field(
        None, ge=0, description="Look for no stop and no end of sequence before so many tokens are generated."
    )
    temperature: float | None = Field(
        None, ge=0, le=2, allow_inf_nan=False, description="0 takes the most likely token. Default: 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Sample from this share of the probability. Default: 1.")
    top_k: int | None = Field(None, ge=-1, description="Sample from this many tokens; 0 or -1: from all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from the logits of tokens generated before."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from a token's logit for each time it was generated."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Above 1 makes tokens of the prompt and of the answer less likely."
    )
    logit_bias: Biases | None = Field(None, description="Added to the logits of these token ids, from -100 to 100.")
    seed: int | None = Field(
        None, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS, description="Makes sampling repeatable."
    )
    prompt_logprobs: LogprobCount | None = Field(
        None, description="The log-probability of each prompt token, and of so many of the most likely ones."
    )
    stop: StopStrings | None = Field(None, description="Strings that end the text; they are not part of it.")
    stop_token_ids: list[int] | None = Field(
        None, max_length=MAX_STOP_TOKENS, fail_fast=True, description="Tokens that end the text."
    )
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-sequence token.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave what ended the text at its end.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default: true.")
    return_token_ids: bool | None = Field(None, description="Give the ids of the tokens beside the text.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="For the priority policy; lower goes first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same salt share computed prompts."
    )

    # ---- the form of the answer ----

    response_format: ResponseFormat | None = Field(None, description="JSON, of any form or of a schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="A form of another kind.")
    guided_json: JsonSchema | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: Pattern | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: Pattern | None = Field(None, description="The older name of structured_outputs.grammar.")

    @model_validator(mode="after")
    def _one_form_that_can_end(self) -> GenerationBody:
        if len(self._forms()) > 1:
            raise PydanticCustomError("forms", "should ask for one form of the answer, not for several")
        endless = self.ignore_eos or getattr(self, "min_tokens", None)
        if self._forms() and endless:
            field = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise PydanticCustomError(
                "unsupported", "cannot be kept to where the answer ends with its form; leave it out", {"field": field}
            )
        return self

    def _forms(self) -> list[StructuredSpec]:
        specs = form_specs(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        spec = self.response_format.spec() if self.response_format is not None else None
        specs += [] if spec is None else [spec]
        return specs + ([] if self.structured_outputs is None else [self.structured_outputs.spec()])

    @property
    def structured(self) -> StructuredSpec | None:
        """The form that the answer must have, if any."""
        return next(iter(self._forms()), None)

    @property
    def form_field(self) -> str:
        """The field that asks for it."""
        names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
        return next((name for name in names if getattr(self, name) is not None), "guided_grammar")

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "is only for stream: true; set that or leave it out", {"field": "stream_options"}
            )
        return self

    @model_validator(mode="after")
    def _something_to_answer(self) -> GenerationBody:
        if self.max_tokens == 0 and self.num_prompt_logprobs is None and not self.echoes:
            raise PydanticCustomError(
                "unsupported", "= 0 generates nothing: it is for echo and prompt_logprobs only", {"field": "max_tokens"}
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_need_a_whole_answer(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "unsupported", "is not for stream: true; leave out one of them", {"field": "prompt_logprobs"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def num_sequences(self) -> int:
        """Sequences that are run for each prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted with each generated one; ``None`` for no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def requested_max_tokens(self) -> int | None:
        """How many tokens the client wants at most, if it says so."""
        return self.max_tokens

    def sampling_params(self, *, max_tokens: int | None) -> SamplingParams:
        """Returns what the sampler is asked, with the API's defaults where the body says nothing.

        Raises:
            APIError: 400, fields that do not go together.
        """
        min_tokens = _or(self.min_tokens, 0)
        if max_tokens is not None and min_tokens > max_tokens:
            message = f"min_tokens = {shown(min_tokens)} is more than max_tokens = {shown(max_tokens)}; lower it"
            raise bad_request(message, "min_tokens", code="invalid_value")
        return SamplingParams(
            n=self.num_sequences,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, 0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            structured=self.structured,
        )

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt."""
        return False


class CompletionBody(GenerationBody):
    """The body of ``POST /v1/completions``."""

    unsupported: ClassVar[Unsupported] = GenerationBody.unsupported | {"suffix": ()}

    prompt: Prompts = Field(description="A text, token ids, or a list of either: n choices for each item, in order.")
    add_special_tokens: bool | None = Field(None, description="Begin a text with the model's BOS token. Default: true.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Sequences to generate; given are the n whose tokens are likeliest.",
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt, and the logprobs with the prompt's.")
    logprobs: LogprobCountOrFalse = Field(
        None, description="The log-probability of each token, and of so many of the most likely ones."
    )

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> CompletionBody:
        if self.best_of is None:
            return self
        n = self.n or 1
        if self.best_of < n:
            raise PydanticCustomError("unsupported", f"must be at least n = {n}", {"field": "best_of"})
        if self.stream and self.best_of > n:
            raise PydanticCustomError(
                "unsupported",
                "is not for stream: true, where nothing can be taken back; leave out one of them",
                {"field": "best_of"},
            )
        return self

    @property
    def num_sequences(self) -> int:
        """Sequences that are run for each prompt."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted with each generated one; ``None`` for no logprobs at all."""
        ranked = self.num_sequences > (self.n or 1)
        return 0 if ranked and self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt; an echo has those of its logprobs."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt."""
        return bool(self.echo)


class TextPart(Body):
    """A piece of a message's content."""

    place = "messages[].content[]"

    type: Literal["text"]
    text: str


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessageBody(Body):
    """One message of a conversation."""

    place = "messages[]"
    unsupported: ClassVar[Unsupported] = {"function_call": (), "audio": (), "refusal": ()}
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
    tool_calls: list[ToolCallBody] | None = Field(None, description="For the role assistant: what it called.")
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
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[MessageBody] = Field(min_length=1, fail_fast=True, description="The conversation so far.")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens, which it overrides. Default: up to the model's length."
    )
    tools: list[ToolBody] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="What the model may call."
    )
    tool_choice: ToolChoiceField | None = Field(
        None, description="Whether it may call, must, or must call a certain function. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call twice. Default: true.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the assistant's turn begun.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, an assistant's, instead of a new one."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")
    logprobs: bool | None = Field(None, description="Give the log-probability of each token of the answer.")
    top_logprobs: LogprobCount | None = Field(
        None, description="With logprobs: give also those of so many of the most likely tokens."
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "unsupported", "is only for logprobs: true; set that or leave it out", {"field": "top_logprobs"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted with each generated one; ``None`` for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if reserved := TEMPLATE_VARIABLES & (value or {}).keys():
            raise PydanticCustomError("reserved", f"should not set {min(reserved)}, which the request's own fields do")
        return value

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice or ToolChoice("auto")
        problem = None
        if len(set(names)) < len(names):
            problem = "tools", "should not have two functions of one name"
        elif choice.mode in ("required", "named") and not names:
            problem = "tool_choice", "is set to force a call, so tools is needed"
        elif choice.mode == "named" and choice.name not in names:
            problem = "tool_choice", "names a function that is not among the tools"
        elif choice.mode in ("required", "named") and super().structured is not None:
            problem = super().form_field, "cannot be kept to by a call, which tool_choice forces; leave one out"
        elif self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != "assistant"):
            problem = "continue_final_message", "is for a last message of the assistant, without add_generation_prompt"
        if problem is not None:
            raise PydanticCustomError("unsupported", problem[1], {"field": problem[0]})
        return self

    @property
    def tools_in_use(self) -> list[ToolBody]:
        """What the model may call: nothing where tool_choice is none."""
        return [] if self.tool_choice == ToolChoice("none") else self.tools or []

    @property
    def structured(self) -> StructuredSpec | None:
        """The form that the answer must have, if any: of what is asked for, or of a forced call."""
        forced = call_spec(
            self.tools or (), self.tool_choice or ToolChoice("auto"), parallel=self.parallel_tool_calls is not False
        )
        return forced or super().structured

    @property
    def form_field(self) -> str:
        """The field that asks for it."""
        forces = self.tool_choice is not None and self.tool_choice.mode in ("required", "named")
        return "tools" if forces else super().form_field

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
        raise _explain(error.errors(include_url=False)[0]) from None


def _explain(error: ErrorDetails) -> APIError:
    """Says what to change, from what pydantic says is wrong."""
    context = error.get("ctx", {})
    field = (context["field"],) if error["type"] == "unsupported" else ()
    param = _path((*error["loc"], *field))
    match error["type"]:
        case "unsupported":
            return bad_request(f"{param} {error['msg']}", param, code="unsupported_parameter")
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
