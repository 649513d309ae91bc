"""Speaks the OpenAI API for a server that does not.

An adapter turns a request for `/v1/completions` or `/v1/chat/completions` into one JSON object to post, and the JSON
object that comes back into the API's answer. The router does the rest: headers, timeouts, and a stream of one piece for
clients that ask for one. Any object with the two methods of :class:`Adapter` will do; ``--stable-adapter
package.module:NAME`` calls ``NAME()`` to make it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from chairlift.config import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Json = dict[str, Any]


class AdapterError(Exception):
    """The other server has no such thing; the message says what to change in the request."""


class Adapter(Protocol):
    """The way to and from a server of another shape."""

    def request(self, path: str, body: Json) -> tuple[str, Json]:
        """Returns the path to post to and the JSON object to post.

        Args:
            path: ``/v1/completions`` or ``/v1/chat/completions``.
            body: what the client sent.

        Raises:
            AdapterError: it cannot be put to this server. The client gets a 400.
        """

    def answer(self, path: str, body: Json, reply: Json) -> Json:
        """Returns the API's answer, as for a request that does not stream.

        Args:
            path, body: as above.
            reply: what the server answered with a status of 200.

        Raises:
            AdapterError: ``reply`` is not what it should be. The client gets a 502.
        """


class GenerateAdapter:
    """For a plain ``POST /generate``: ``{"prompt", "max_tokens", …}`` in, ``{"text"}`` out.

    ``text`` may be a string or a list of one, and may begin with the prompt, which is cut off. A chat becomes lines of
    ``role: content`` that end in ``assistant:``.
    """

    PASSED_ON = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")

    def request(self, path: str, body: Json) -> tuple[str, Json]:
        """See :class:`Adapter`."""
        if body.get("n", 1) != 1:
            raise AdapterError("this server gives one answer; leave out n")
        prompt = _chat_prompt(body) if path == CHAT else body.get("prompt")
        if not isinstance(prompt, str):
            raise AdapterError("this server takes a prompt that is one text")
        passed_on = {name: body[name] for name in self.PASSED_ON if body.get(name) is not None}
        if "max_tokens" not in passed_on and body.get("max_completion_tokens") is not None:
            passed_on["max_tokens"] = body["max_completion_tokens"]
        return "/generate", {"prompt": prompt, **passed_on}

    def answer(self, path: str, body: Json, reply: Json) -> Json:
        """See :class:`Adapter`."""
        text = reply.get("text")
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not isinstance(text, str):
            raise AdapterError("the answer of /generate has no text")
        prompt = _chat_prompt(body) if path == CHAT else body["prompt"]
        return openai_answer(path, str(body.get("model", "")), text.removeprefix(prompt))


ADAPTERS: dict[str, Callable[[], Adapter]] = {"generate": GenerateAdapter}


def load_adapter(name: str) -> Adapter:
    """Returns the adapter of a name in :data:`ADAPTERS`, or of ``package.module:NAME``.

    Raises:
        ConfigError: there is none.
    """
    module, colon, attribute = name.partition(":")
    try:
        make = getattr(import_module(module), attribute) if colon else ADAPTERS[name]
        adapter: Adapter = make()
    except KeyError:
        raise ConfigError(
            f"--stable-adapter: there is no {name!r}; there are {', '.join(ADAPTERS)}, or give package.module:NAME"
        ) from None
    except Exception as error:
        raise ConfigError(f"--stable-adapter: cannot make {name}: {error}") from error
    if not (callable(getattr(adapter, "request", None)) and callable(getattr(adapter, "answer", None))):
        raise ConfigError(f"--stable-adapter: {name} has no methods request and answer")
    return adapter


def openai_answer(path: str, model: str, text: str, finish_reason: str = "stop") -> Json:
    """Returns the API's answer with one choice; for adapters."""
    chat = path == CHAT
    content: Json = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}],
    }


def as_events(answer: Json) -> bytes:
    """Returns an answer as a stream of one piece, ``[DONE]`` included."""
    chunk = {**answer, "object": answer["object"].replace("chat.completion", "chat.completion.chunk")}
    chunk["choices"] = [
        {("delta" if key == "message" else key): value for key, value in choice.items()} for choice in answer["choices"]
    ]
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\ndata: [DONE]\n\n"


def _chat_prompt(body: Json) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AdapterError("messages must be a list with at least one message")
    lines = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
        if not isinstance(role, str) or not isinstance(content, str):
            raise AdapterError("this server takes messages that have a role and a text")
        lines.append(f"{role}: {content}\n")
    return "".join(lines) + "assistant:"
