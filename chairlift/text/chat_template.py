"""A conversation to the text that the model was trained on, by the template that came with the model.

Templates are Jinja, and assume the environment that ``transformers`` gives them. They are downloaded code, so they run
in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chairlift.text.errors import ChatTemplateError


class ChatTemplate:
    """The chat templates of one model; compiled when first used, so that a broken one leaves completions working."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Takes templates by name and the special tokens that they may mention.

        Args:
            templates: Jinja source by name; "default" is for plain chat, "tool_use" for chat with tools if it exists.
            special_tokens: text by role, such as ``{"bos_token": "<s>"}``.
        """
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders the conversation; see :meth:`chairlift.text.tokenizer.Tokenizer.apply_chat_template`.

        Raises:
            ChatTemplateError: there is no template, or it does not accept these messages.
        """
        if not messages:
            raise ChatTemplateError("messages must not be empty")
        template = self._template("tool_use" if tools and "tool_use" in self._templates else "default")
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": [_plain_message(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except Exception as error:  # template code may fail in any way that Python can
            raise ChatTemplateError(f"the model's chat template does not accept this request: {error}") from error

    @property
    def source(self) -> str:
        """The template for chat with tools where there is one, else the one for plain chat; empty if there is none."""
        return self._templates.get("tool_use", self._templates.get("default", ""))

    @cached_property
    def takes_tools(self) -> bool:
        """Whether tools make a difference to what is rendered."""
        try:
            return "tools" in meta.find_undeclared_variables(_environment().parse(self.source))
        except jinja2.TemplateError:
            return False

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            known = f" (it has only {', '.join(sorted(self._templates))})" if self._templates else ""
            raise ChatTemplateError(
                f"this model has no chat template{known}, so it cannot chat; completions (/v1/completions) work"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._templates[name])
            except jinja2.TemplateError as error:
                raise ChatTemplateError(
                    f"this model's chat template is broken: {error}; completions (/v1/completions) work"
                ) from error
        return self._compiled[name]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message in the shape that templates expect.

    Text parts become one string, the arguments of tool calls become objects, and keys without a value are dropped.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), (list, tuple)):
        plain["content"] = "".join(_part_text(part) for part in plain["content"])
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise ChatTemplateError(f"content parts of type {kind!r} are not supported; this model reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError("a content part of type 'text' needs a string 'text'")
    return text


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise ChatTemplateError(f"the arguments of tool call {function.get('name')!r} are not JSON") from error
    return {**call, "function": function}


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's words for training; here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 -- declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which the model would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
