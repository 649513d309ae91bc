"""One streamed completion from an OpenAI endpoint, with the time of each piece."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Prompt = str | tuple[int, ...]

MOST_ERROR_TEXT = 300


@dataclass(slots=True)
class Answer:
    """What came back. Times are those of ``time.perf_counter``.

    Attributes:
        sent: when the request was handed to the connection.
        times: when each piece with text came.
        finished: when the stream ended, or failed.
        prompt_tokens, output_tokens: as the server counts them; ``None`` where it does not say.
        cached_tokens: prompt tokens that the server took from a prefix cache, where it says so.
        text: all pieces together.
        error: why it failed, in one line; what came before is kept.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    finished: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None


class BadStreamError(Exception):
    """The server's answer is not what its protocol says."""


async def stream_completion(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    """Posts ``body`` and reads the server-sent events to their end. Never raises for what a server can do wrong."""
    answer = Answer(time.perf_counter())
    try:
        async with session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace")).strip()
                raise BadStreamError(f"HTTP {response.status}: {_error_message(text)}")
            await _read(response, answer)
    except BadStreamError as error:
        answer.error = str(error)
    except TimeoutError:
        answer.error = "no answer within the time limit"
    except aiohttp.ClientConnectorError as error:
        answer.error = f"cannot connect to {error.host}:{error.port}: {error.strerror or error}"
    except (aiohttp.ClientError, OSError) as error:
        at = f" after {len(answer.times)} pieces" if answer.times else ""
        answer.error = f"the connection broke{at}: {error or type(error).__name__}"
    answer.finished = time.perf_counter()
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    done = False
    async for data in _events(response):
        now = time.perf_counter()
        if data == "[DONE]":
            done = True
            break
        try:
            chunk = json.loads(data)
            usage = chunk.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            pieces = [_piece(choice) for choice in chunk.get("choices") or ()]
            error = chunk.get("error")
        except (ValueError, AttributeError, TypeError) as cause:
            raise BadStreamError(f"an event that is no completion chunk: {data[:80]!r}") from cause
        if error:
            raise BadStreamError(f"the server reported in its stream: {_error_message(json.dumps(chunk))}")
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
        answer.cached_tokens = cached if cached is not None else answer.cached_tokens
        if any(has_token for has_token, _ in pieces):
            answer.times.append(now)
            answer.text += "".join(text for _, text in pieces)
    if not done:
        raise BadStreamError(f"the stream ended after {len(answer.times)} pieces without [DONE]")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each event. Lines of other fields and comments are passed over, as the standard says."""
    data: list[str] = []
    rest = b""
    async for received in response.content.iter_any():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise BadStreamError(f"a line that is no server-sent event: {line[:80]!r}")
    if rest.strip() or data:
        raise BadStreamError("the stream ended in the middle of an event")


def _piece(choice: dict[str, Any]) -> tuple[bool, str]:
    """Whether a choice brings a token, and its text. A chat's opening chunk names the role and brings none."""
    if "text" in choice:
        text = choice["text"] or ""
        return bool(text) or choice.get("finish_reason") is None, text
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return bool(text), text


def _error_message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = text or "an empty answer"
    return " ".join(str(message).split())[:MOST_ERROR_TEXT]
