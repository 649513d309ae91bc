"""The fields by which a client asks for an answer of a certain form, and the check that such a form can be followed.

OpenAI's ``response_format``, and vLLM's ``structured_outputs`` and the ``guided_*`` fields that it replaced.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from chairlift.api.fields import Body
from chairlift.engine.executor import Capacity
from chairlift.engine.structured import MAX_FORM_CHARACTERS, FormCompiler, FormError
from chairlift.scheduling.sampling_params import StructuredSpec
from chairlift.text.tokenizer import Tokenizer

MAX_CHOICES = 4096
COMPILE_SECONDS = 10.0
COMPILE_THREADS = 2


def _schema(value: object) -> object:
    """vLLM takes a schema as text too."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise PydanticCustomError("schema", "should be a JSON schema, as an object or as its text") from None


JsonSchema = Annotated[dict[str, Any] | bool, BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | str)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_FORM_CHARACTERS)]


class JsonSchemaFormat(Body):
    """A named schema."""

    place = "response_format.json_schema"
    ignored = frozenset({"name", "description"})

    json_schema: dict[str, Any] = Field(alias="schema", description="A JSON schema.")
    strict: bool | None = Field(None, description="The answer keeps to the schema whether this is set or not.")


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    place = "response_format"
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Only with the type json_schema.")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "is missing" if self.json_schema is None else "is only for the type json_schema"
            raise PydanticCustomError("unsupported", message, {"field": "json_schema"})
        return self

    def spec(self) -> StructuredSpec | None:
        """The form asked for; ``None`` for any text."""
        if self.json_schema is not None:
            return schema_spec(self.json_schema.json_schema)
        return StructuredSpec("json_object") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form: exactly one of its fields."""

    place = "structured_outputs"
    unsupported = {  # noqa: RUF012 - declared so by Body
        "structural_tag": (),
        "whitespace_pattern": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
    }

    json_form: JsonSchema | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: Pattern | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Choices | None = Field(None, description="Texts, one of which is the answer.")
    grammar: Pattern | None = Field(None, description="A context-free grammar, as GBNF or in the manner of Lark.")

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if len(self._specs()) != 1:
            raise PydanticCustomError(
                "forms", "should have exactly one of json, json_object, regex, choice and grammar"
            )
        return self

    def _specs(self) -> list[StructuredSpec]:
        return form_specs(self.json_form, self.regex, self.choice, self.grammar) + (
            [StructuredSpec("json_object")] if self.json_object else []
        )

    def spec(self) -> StructuredSpec:
        """The form asked for."""
        return self._specs()[0]


def schema_spec(schema: dict[str, Any] | bool) -> StructuredSpec:
    """The form of JSON that a schema describes."""
    return StructuredSpec("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def form_specs(
    schema: dict[str, Any] | bool | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[StructuredSpec]:
    """Each of those that are given, as a form."""
    specs = [] if schema is None else [schema_spec(schema)]
    specs += [] if regex is None else [StructuredSpec("regex", regex)]
    specs += [] if choice is None else [StructuredSpec("choice", json.dumps(choice))]
    specs += [] if grammar is None else [StructuredSpec("grammar", grammar)]
    return specs


class FormChecker:
    """Finds out whether a form can be followed before any engine hears of it.

    Compiling can take seconds, so it is done in threads of its own, and a client that sends many such forms waits for
    itself and for others that do.
    """

    def __init__(self, tokenizer: Tokenizer, capacity: Capacity) -> None:
        self._compiler = FormCompiler(
            lambda: tokenizer, capacity.vocab_size, capacity.eos_token_ids or tokenizer.eos_token_ids
        )
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "chairlift-form-checks")

    async def check(self, spec: StructuredSpec) -> None:
        """Returns if the form can be followed.

        Raises:
            FormError: it cannot be, or to find out takes too long. The message says why.
        """
        if self._compiler.known(spec):
            return
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compiler.compile, spec)
        try:
            await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            raise FormError(f"it takes more than {COMPILE_SECONDS:g} seconds to compile") from None
