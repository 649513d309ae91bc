"""Tools: the functions that a model may call, what it is made to call, and what it called.

https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from chairlift.api.fields import Body
from chairlift.api.forms import schema_spec
from chairlift.scheduling.sampling_params import StructuredSpec

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionBody(Body):
    """A function that the model may call."""

    place = "tools[].function"

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of its arguments, which is an object.")
    strict: bool | None = Field(
        None, description="Arguments keep to the schema where a call is forced; where it is not, the model decides."
    )


class ToolBody(Body):
    """A tool."""

    place = "tools[]"

    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {
            "type": "function",
            "function": {**function, "parameters": self.function.parameters or NO_PARAMETERS},
        }


NO_PARAMETERS = {"type": "object", "properties": {}}


class CalledFunctionBody(Body):
    """What a call of an earlier answer was."""

    place = "messages[].tool_calls[].function"

    name: str
    arguments: str = Field(description="JSON text.")


class ToolCallBody(Body):
    """A call of an earlier answer."""

    place = "messages[].tool_calls[]"
    ignored = frozenset({"index"})

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionBody


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call, or must.

    Attributes:
        mode: "none", "auto", "required", or "named": it must call ``name``.
        name: of a function.
    """

    mode: str
    name: str | None = None


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(str(value))
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "function", "name": str(name)}:  # as the responses API has it
            return ToolChoice("named", name)
    raise PydanticCustomError(
        "tool_choice", 'should be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    )


ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
]


def call_spec(tools: Sequence[ToolBody], choice: ToolChoice, *, parallel: bool) -> StructuredSpec | None:
    """The form of an answer that must be a call, or several: an array of them, or the arguments of the one named."""
    if choice.mode == "named":
        [function] = [tool.function for tool in tools if tool.function.name == choice.name]
        return schema_spec(_arguments(function))
    if choice.mode != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    # A schema within another one still means itself where it refers to its root.
    schema["$defs"] = {
        str(index): _moved(_arguments(tool.function), f"#/$defs/{index}") for index, tool in enumerate(tools)
    }
    return schema_spec(schema)


def _arguments(function: FunctionBody) -> dict[str, Any]:
    """The schema of a forced call's arguments: those that the function names, and others only if it says so."""
    schema = function.parameters or NO_PARAMETERS
    return (
        {**schema, "additionalProperties": schema.get("additionalProperties", False)}
        if "properties" in schema
        else schema
    )


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, root)
        for key, value in schema.items()
    }
