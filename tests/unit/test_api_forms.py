"""Fields that ask for a form, or for calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.api.errors import APIError
from chairlift.api.schema import ChatBody, CompletionBody, parse
from chairlift.api.tools import ToolChoice
from chairlift.scheduling.sampling_params import StructuredSpec

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredSpec("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredSpec("json_schema", TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredSpec("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT}}, StructuredSpec("json_schema", TEXT)),
        ({"structured_outputs": {"json_object": True}}, StructuredSpec("json_object")),
        ({"structured_outputs": {"regex": "[ab]+"}}, StructuredSpec("regex", "[ab]+")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, StructuredSpec("choice", '["\\u00e9", "b"]')),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, StructuredSpec("grammar", 'start: "x"')),
        ({"guided_json": SCHEMA}, StructuredSpec("json_schema", TEXT)),
        ({"guided_regex": "a"}, StructuredSpec("regex", "a")),
        ({"guided_choice": ["a"]}, StructuredSpec("choice", '["a"]')),
        ({"guided_grammar": 'root ::= "x"'}, StructuredSpec("grammar", 'root ::= "x"')),
    ],
)
@pytest.mark.parametrize(("model", "body"), [(ChatBody, CHAT), (CompletionBody, COMPLETION)])
def test_forms(model: Any, body: dict[str, Any], fields: dict[str, Any], spec: StructuredSpec | None) -> None:
    parsed = parse(model, body | fields)
    assert parsed.structured == spec
    assert parsed.sampling_params(max_tokens=5).structured == spec
    if spec is not None:
        assert parsed.form_field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "no schema"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, None),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
        ({"tools": [tool("f")] * 2}, "tools"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": True,
                "messages": [{"role": "assistant", "content": "x"}],
            },
            "continue_final_message",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(APIError) as refusal:
        parse(ChatBody, CHAT | fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_a_forced_call_has_the_form_of_its_parameters() -> None:
    body = CHAT | {"tools": [tool("f", SCHEMA), tool("g")]}
    named = parse(ChatBody, body | {"tool_choice": {"type": "function", "function": {"name": "f"}}})
    assert named.structured is not None
    assert json.loads(named.structured.value) == SCHEMA | {"additionalProperties": False}
    open_ended = tool("f", SCHEMA | {"additionalProperties": {"type": "integer"}})
    function = {"type": "function", "function": {"name": "f"}}
    as_asked = parse(ChatBody, CHAT | {"tools": [open_ended], "tool_choice": function})
    assert as_asked.structured is not None
    assert json.loads(as_asked.structured.value)["additionalProperties"] == {"type": "integer"}
    required = parse(ChatBody, body | {"tool_choice": "required"})
    assert required.structured is not None
    schema = json.loads(required.structured.value)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["f", "g"]
    assert "maxItems" not in schema
    one = parse(ChatBody, body | {"tool_choice": "required", "parallel_tool_calls": False})
    assert one.structured is not None
    assert json.loads(one.structured.value)["maxItems"] == 1
    assert one.form_field == "tools"
    assert parse(ChatBody, body).structured is None


def test_references_within_parameters_still_point_to_their_own_root() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/A"}, "again": {"$ref": "#"}}, "$defs": {"A": {"enum": [1]}}}
    body = parse(ChatBody, CHAT | {"tools": [tool("f", parameters)], "tool_choice": "required"})
    assert body.structured is not None
    moved = json.loads(body.structured.value)["$defs"]["0"]
    assert moved["properties"] == {"a": {"$ref": "#/$defs/0/$defs/A"}, "again": {"$ref": "#/$defs/0"}}


def test_tools_are_in_use_unless_the_choice_is_none() -> None:
    body = CHAT | {"tools": [tool("f")]}
    assert [t.function.name for t in parse(ChatBody, body).tools_in_use] == ["f"]
    assert parse(ChatBody, body | {"tool_choice": "none"}).tools_in_use == []
    assert parse(ChatBody, body | {"tool_choice": "required"}).tool_choice == ToolChoice("required")
