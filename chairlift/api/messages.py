"""From the text of an answer to a message: its content, and its calls of tools."""

from __future__ import annotations

from typing import Any

from chairlift.api.errors import bad_request
from chairlift.api.generation import Frontend
from chairlift.api.schema import ChatBody
from chairlift.api.tools import ToolChoice
from chairlift.text.tool_calls import (
    PARSERS,
    NamedParser,
    Piece,
    RequiredParser,
    ToolCallDelta,
    ToolCallParser,
    new_call_id,
)


def check_tools(frontend: Frontend, body: ChatBody) -> None:
    """Raises a 400 :class:`APIError` if there are tools and the model has none."""
    called = next((i for i, message in enumerate(body.messages) if message.tool_calls), None)
    if (body.tools_in_use or called is not None) and not frontend.tokenizer.chat_template.takes_tools:
        raise bad_request(
            "this model's chat template has no tools, so the model was not taught to call any; leave them out",
            "tools" if body.tools_in_use else f"messages[{called}].tool_calls",
            code="unsupported_parameter",
        )


class MessageReaders:
    """Makes a reader for each choice of an answer.

    Raises:
        APIError: 400, the model cannot be given tools, or how it calls them is not known.
    """

    def __init__(self, frontend: Frontend, body: ChatBody) -> None:
        self.parser_name = frontend.tool_call_parser
        self._tools = bool(body.tools_in_use)
        self._choice = body.tool_choice or ToolChoice("auto")
        self._parallel = body.parallel_tool_calls is not False
        check_tools(frontend, body)
        if self._tools and self._choice.mode == "auto" and self.parser_name is None:
            raise bad_request(
                "how this model writes calls is not known; start the server with --tool-call-parser, or force a call "
                "with tool_choice",
                "tools",
                code="unsupported_parameter",
            )

    @property
    def need_special_tokens(self) -> bool:
        """Whether the marks of calls are special tokens, which are left out of the text else."""
        return self._tools and self._choice.mode == "auto" and self.parser_name in ("mistral", "llama3_json")

    def new(self) -> MessageReader:
        """A reader for one choice."""
        return MessageReader(
            self._parser(),
            call_id_style=self.parser_name,
            most_calls=None if self._parallel else 1,
            forced=self._choice.mode == "named",
        )

    def _parser(self) -> ToolCallParser | None:
        if not self._tools:
            return None
        if self._choice.name is not None:
            return NamedParser(self._choice.name)
        if self._choice.mode == "required":
            return RequiredParser()
        return PARSERS[self.parser_name]() if self.parser_name is not None else None


class MessageReader:
    """Reads one message as its text comes.

    Args:
        parser: tells calls from content; ``None`` where all is content.
        call_id_style: see :func:`~chairlift.text.tool_calls.new_call_id`.
        most_calls: further ones are dropped.
        forced: the client named the function, so that the call is no reason to finish.

    Attributes:
        content: all of it by now.
        calls: all calls by now, as the chat API has them.
    """

    def __init__(
        self, parser: ToolCallParser | None, *, call_id_style: str | None, most_calls: int | None, forced: bool
    ) -> None:
        self.calls: list[dict[str, Any]] = []
        self._parts: list[str] = []
        self._arguments: list[list[str]] = []
        self._parser = parser
        self._call_id_style = call_id_style
        self._most_calls = most_calls
        self._forced = forced

    @property
    def content(self) -> str:
        """The text that is no call."""
        return "".join(self._parts)

    def push(self, text: str) -> list[Piece]:
        """Takes more text and returns what of it is certain to be content, or to belong to a call."""
        if self._parser is None:
            return self._take([text] if text else [])
        return self._take(self._parser.push(text))

    def finish(self) -> list[Piece]:
        """Returns what was held back, at the end of the text."""
        pieces = self._take(self._parser.finish()) if self._parser is not None else []
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the message ended, as the chat API has it."""
        return "tool_calls" if self.calls and reason == "stop" and not self._forced else reason

    def _take(self, pieces: list[Piece]) -> list[Piece]:
        kept = []
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                if self._most_calls is not None and piece.index >= self._most_calls:
                    continue
                if piece.index == len(self.calls):
                    function = {"name": piece.name, "arguments": ""}
                    self.calls.append(
                        {"id": new_call_id(self._call_id_style), "type": "function", "function": function}
                    )
                    self._arguments.append([])
                self._arguments[piece.index].append(piece.arguments)
            else:
                self._parts.append(piece)
            kept.append(piece)
        return kept
