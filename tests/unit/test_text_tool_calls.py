"""Calls in text, in whatever pieces the text comes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.text.tool_calls import PARSERS, NamedParser, RequiredParser, detect_parser, new_call_id

ARGUMENTS = '{"city": "Par}is \\"{[", "days": [1, {"a": []}]}'


def read(parser, text, cuts=()):
    """Content, and (name, arguments) of each call, as a client accumulates them."""
    content, calls = "", []
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [piece for start, end in itertools.pairwise(bounds) for piece in parser.push(text[start:end])]
    for piece in pieces + parser.finish():
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append([piece.name, piece.arguments])
        else:
            calls[piece.index][1] += piece.arguments
    return content, [tuple(call) for call in calls]


def call(key="arguments", name="weather"):
    return f'{{"name": "{name}", "{key}": {ARGUMENTS}}}'


CASES = {
    "hermes": ("hermes", f"<tool_call>\n{call()}\n</tool_call>", "", ["weather"]),
    "hermes, two after content": (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{call()}\n</tool_call>\n<tool_call>{call(name='f')}</tool_call>",
        "Let me see.",
        ["weather", "f"],
    ),
    "hermes, content behind": ("hermes", f"<tool_call>{call()}</tool_call> So <b>", " So <b>", ["weather"]),
    "hermes, no end": ("hermes", f"<tool_call>{call()}</tool", "", ["weather"]),
    "llama": ("llama3_json", call("parameters"), "", ["weather"]),
    "llama, two, with a tag": (
        "llama3_json",
        f"<|python_tag|>{call('parameters')}; {call('parameters', 'f')}",
        "",
        ["weather", "f"],
    ),
    "mistral": ("mistral", f"[TOOL_CALLS] [{call()}, {call(name='f')}]", "", ["weather", "f"]),
    "mistral, newer": (
        "mistral",
        f"Well [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f{ARGUMENTS}",
        "Well",
        ["weather", "f"],
    ),
}


@pytest.mark.parametrize("case", CASES)
@given(cuts=st.lists(st.integers(0, 160), max_size=6))
def test_calls_are_read_however_the_text_is_cut(case, cuts):
    name, text, content, names = CASES[case]
    assert read(PARSERS[name](), text, cuts) == (content, [(function, ARGUMENTS) for function in names])
    assert read(PARSERS[name](), text, range(len(text))) == (content, [(function, ARGUMENTS) for function in names])


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world\n",
        " \n leading and trailing \n ",
        '{"answer": {"name": [1]}}',
        '{"name": 5}',
        "{not JSON}",
        '{"open": ',
        "<tool_call>no call",
        "<tool_c",
        "[TOOL_CALLS]",
        "[TOOL",
        "",
    ],
)
def test_what_is_no_call_stays_content(name, text):
    assert read(PARSERS[name](), text, range(len(text))) == (text, [])


@given(text=st.text('<tol_ca>{}[]"\\:,; nameTOOL_CALLS]rgumets', max_size=80), name=st.sampled_from(sorted(PARSERS)))
def test_no_text_breaks_a_parser(text, name):
    assert read(PARSERS[name](), text) == read(PARSERS[name](), text, range(len(text)))


def test_fields_in_another_order_and_arguments_as_text():
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "{}"}'
    assert read(PARSERS["hermes"](), text) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    assert read(PARSERS["hermes"](), '<tool_call>{"name": "f"}') == ("", [("f", "{}")])


def test_arguments_are_passed_on_as_they_come():
    parser = PARSERS["hermes"]()
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": ')[0].arguments == '{"a": '
    assert [piece.arguments for piece in parser.push("1")] == ["1"]
    assert parser.finish() == []


def test_a_call_cut_short_keeps_what_came():
    assert read(PARSERS["hermes"](), '<tool_call>{"name": "f", "arguments": {"a": "b') == ("", [("f", '{"a": "b')])


def test_forced_calls():
    both = json.dumps([{"name": "f", "parameters": {"x": []}}, {"name": "g", "parameters": {}}])
    calls = [("f", '{"x": []}'), ("g", "{}")]
    assert read(RequiredParser(), both) == read(RequiredParser(), both, range(len(both))) == ("", calls)
    assert read(NamedParser("f"), ARGUMENTS, range(60)) == ("", [("f", ARGUMENTS)])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for t in tools %}{% endfor %}<tool_call>", "hermes"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{"name": function name, "parameters": dictionary} {{ tools }}', "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_parsers_are_told_by_the_template(template, name):
    assert detect_parser(template) == name


def test_ids():
    assert len(new_call_id("mistral")) == 9
    assert new_call_id("hermes").startswith("call_")
    assert new_call_id("hermes") != new_call_id("hermes")
