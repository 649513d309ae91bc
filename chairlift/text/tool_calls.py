"""Tool calls in the text of a model, while it comes.

Families write a call in ways of their own; a parser for each takes the text as it is generated and tells content from
calls. Nothing is lost: text that looked like a call and is none comes out as content.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call, as the chat API streams it.

    Attributes:
        index: which call of the message.
        arguments: more of the arguments' JSON text.
        name: of the function, with the call's first piece only.
    """

    index: int
    arguments: str
    name: str | None = None


Piece = str | ToolCallDelta
"""Content, or a piece of a call."""


class ToolCallParser(Protocol):
    """Reads one message."""

    def push(self, text: str) -> list[Piece]:
        """Takes more text and returns what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Returns what was held back, at the end of the text."""
        ...


class _Call:
    """One call: a JSON object with a name and arguments, or, where the name is known, the arguments alone.

    The arguments are passed on as they come if the name stands right before them, as models write it; else all at once.

    Attributes:
        ended: whether the object is complete.
        is_call: whether any piece of a call came out of it.
    """

    _HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')

    def __init__(self, index: int, name: str | None = None) -> None:
        self.ended = False
        self.is_call = False
        self._index = index
        self._name = name
        self._level = 0 if name is not None else 1  # of nesting, at which the arguments stand
        self._raw = ""  # the object so far, until its arguments begin
        self._head_may_come = True
        self._in_arguments = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """Takes text from the object's first brace on; returns pieces, and what is left behind its last brace."""
        pieces: list[Piece] = []
        start = 0  # in ``text``, of the arguments
        for position, character in enumerate(text):
            change = self._nesting(character)
            if change > 0 and self._depth == self._level + 1 and self._head_may_come:
                self._head_may_come = False
                self._in_arguments = character == "{" and self._knows_name(text[: position + 1])
                start = position
            elif change < 0 and self._depth == self._level and self._in_arguments:
                self._in_arguments = False
                pieces += self._arguments(text[start : position + 1])
            if change < 0 and self._depth <= 0:
                self.ended = True
                self._raw += text[: position + 1]
                return pieces + ([] if self.is_call else self._whole()), text[position + 1 :]
        if self._in_arguments:
            pieces += self._arguments(text[start:])
        elif not self.is_call:
            self._raw += text
        return pieces, ""

    def finish(self) -> list[Piece]:
        """What is left of an object that never ended."""
        return [] if self.is_call else [self._raw]

    def _nesting(self, character: str) -> int:
        """Follows the nesting; whether this character opens (1) or closes (-1) an object or an array."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return 0
        self._in_string = character == '"'
        change = (character in "{[") - (character in "}]")
        self._depth += change
        return change

    def _knows_name(self, text: str) -> bool:
        head = self._HEAD.fullmatch(self._raw + text) if self._name is None else None
        if head is not None:
            with contextlib.suppress(ValueError):
                self._name = json.loads(head[1])
        return self._name is not None

    def _arguments(self, text: str) -> list[Piece]:
        name = None if self.is_call else self._name
        self.is_call = True
        return [ToolCallDelta(self._index, text, name)] if text else []

    def _whole(self) -> list[Piece]:
        """A complete object whose fields stand in another order, or that is no call."""
        try:
            call: Any = json.loads(self._raw)
            name = call["name"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return [self._raw]
        if not isinstance(name, str):
            return [self._raw]
        arguments = call.get("arguments", call.get("parameters", {}))
        self.is_call = True
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [ToolCallDelta(self._index, text, name)]


class _Parser(ABC):
    """A parser written as a generator: it is sent text, and yields ``None`` where it needs more."""

    def __init__(self) -> None:
        self._text = ""
        self._pieces: list[Piece] = []
        self._call: _Call | None = None
        self._num_calls = 0
        self._ended = False
        self._spaces = ""  # between content and what may be a call
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        self._text += text
        if text:
            next(self._steps)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        self._ended = True
        next(self._steps, None)
        if self._call is not None:
            self._pieces += self._call.finish()
        self._content(self._text)
        if not self._num_calls:
            self._pieces.append(self._spaces)
        pieces, self._pieces = self._pieces, []
        return [piece for piece in pieces if piece != ""]

    @abstractmethod
    def _read(self) -> Iterator[None]: ...

    def _content(self, text: str) -> None:
        """Passes content on; space at its end waits for more, since none is wanted before a call."""
        text = self._spaces + text
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        if shown:
            self._pieces.append(shown)

    def _all_content(self) -> Iterator[None]:
        while True:
            self._content(self._text)
            self._text = ""
            yield

    def _until(self, marker: str) -> Iterator[None]:
        """Passes content on up to a marker, and takes the marker away."""
        while marker not in self._text:
            longest = min(len(marker) - 1, len(self._text))
            keep = next(n for n in range(longest, -1, -1) if self._text.endswith(marker[:n]))
            shown = len(self._text) - keep
            self._content(self._text[:shown])
            self._text = self._text[shown:]
            yield
        content, _, self._text = self._text.partition(marker)
        self._content(content)
        self._spaces = ""

    def _space(self) -> Iterator[None]:
        """Takes white space away, until there is something else."""
        while not (text := self._text.lstrip()) and not self._ended:
            yield
        self._text = text

    def _object(self, name: str | None = None) -> Iterator[None]:
        """Reads a call whose first brace is next."""
        self._call = _Call(self._num_calls, name)
        while not self._call.ended:
            pieces, self._text = self._call.feed(self._text)
            self._pieces += pieces
            if not self._call.ended:
                yield
        self._num_calls += self._call.is_call
        self._call = None


class HermesParser(_Parser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as often as wanted: Hermes, Qwen2.5, Qwen3."""

    def _read(self) -> Iterator[None]:
        yield
        while True:
            yield from self._until("<tool_call>")
            yield from self._space()
            if not self._text.startswith("{"):
                self._text = "<tool_call>" + self._text
                yield from self._all_content()
            yield from self._object()
            yield from self._space()
            end = "</tool_call>"
            while len(self._text) < len(end) and end.startswith(self._text):
                if self._ended:
                    self._text = ""
                yield
            self._text = self._text.removeprefix(end)


class Llama3Parser(_Parser):
    """``{"name": …, "parameters": {…}}``, the whole message, several with semicolons between: Llama 3.1 and later."""

    def _read(self) -> Iterator[None]:
        yield
        tag = "<|python_tag|>"
        while len(self._text) < len(tag) and tag.startswith(self._text):
            yield
        self._text = self._text.removeprefix(tag)
        while (text := self._text.lstrip()) == "":
            yield
        if text[0] != "{":
            yield from self._all_content()
        self._text = text
        while True:
            yield from self._object()
            yield from self._space()
            if self._text[:1] != ";":
                yield from self._all_content()
            self._text = self._text[1:]
            yield from self._space()
            if self._text[:1] != "{":
                yield from self._all_content()


class MistralParser(_Parser):
    """``[TOOL_CALLS]`` and an array of calls, or, in newer models, a name and its arguments: Mistral."""

    def _read(self) -> Iterator[None]:
        yield
        while True:
            yield from self._until("[TOOL_CALLS]")
            yield from self._space()
            if self._text.startswith("["):
                yield from self._array()
            else:
                while "{" not in self._text:
                    if self._ended:
                        self._text = "[TOOL_CALLS]" + self._text
                    yield
                head, _, rest = self._text.partition("{")
                self._text = "{" + rest
                yield from self._object(head.partition("[")[0].strip())

    def _array(self) -> Iterator[None]:
        while self._text[:1] in ("[", ","):
            self._text = self._text[1:]
            yield from self._space()
            if self._text[:1] == "{":
                yield from self._object()
                yield from self._space()
            elif self._text[:1] != "]":
                self._text = "[" + self._text
                yield from self._all_content()
        self._text = self._text.removeprefix("]")


class RequiredParser(MistralParser):
    """An array of calls and nothing else, as the grammar of ``tool_choice: "required"`` has it."""

    def _read(self) -> Iterator[None]:
        yield
        yield from self._array()
        yield from self._all_content()


class NamedParser(_Parser):
    """The arguments of one call to a named function, as the grammar of a named ``tool_choice`` has it."""

    def __init__(self, name: str) -> None:
        self._named = name
        super().__init__()

    def _read(self) -> Iterator[None]:
        yield
        yield from self._object(self._named)
        yield from self._all_content()


PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
"""By the names that vLLM's flag has for them."""

MARKERS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": '"parameters"'}
"""What the chat template of a family tells it by."""


def detect_parser(template: str) -> str | None:
    """The name of the parser for what models with this chat template write, if it is one of those known."""
    return next((name for name, marker in MARKERS.items() if marker in template), None)


def new_call_id(parser: str | None) -> str:
    """An id for a call; Mistral's templates take nine letters and digits and nothing else."""
    return uuid.uuid4().hex[:9] if parser == "mistral" else f"call_{uuid.uuid4().hex[:24]}"
