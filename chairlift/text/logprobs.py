"""Logprobs as the OpenAI API writes them: of completions, of chat completions, and of prompts.

A token is bytes, and those of a character may be spread over several tokens. One that is no text by itself is written
as its bytes, as OpenAI does: ``bytes:\\xf0\\x9f`` in completions, and ``\\xf0\\x9f`` beside a list of numbers in chat.
So no token's text is empty or the same as another's for want of a character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chairlift.scheduling.plan import TokenLogprob
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_text(tokenizer: Tokenizer, token_id: int, *, bytes_prefix: str = "") -> str:
    """The text of a token alone, or its bytes where it is none; ``token_id:5`` for an id that no token has.

    Args:
        tokenizer: of the model.
        token_id: the token.
        bytes_prefix: what bytes begin with.
    """
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return bytes_prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """Writes the ``logprobs`` of one choice of a completion, piece by piece.

    Args:
        tokenizer: of the model.
        num_top: how many of the most likely tokens are shown with each.
        prompt_token_ids: the prompt, where it is no part of the choice's text.
        skip_special_tokens: whether the choice's text leaves them out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._offset = 0

    def write(self, logprobs: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens: their texts, logprobs, the most likely ones at each place, and where their text begins.

        An offset counts characters of the choice's text. Tokens that share a character have the same one.
        """
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for logprob in logprobs:
            self._begin(fields, logprob.token_id)
            fields["token_logprobs"].append(_finite(logprob.logprob))
            fields["top_logprobs"].append(self._top(logprob))
        return fields

    def write_echo(
        self, prompt_token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], text: str
    ) -> dict[str, list[Any]]:
        """The same for the prompt, where it begins the choice's text as ``text``.

        Its first token has no logprob, nor have others if the sequence ended before theirs were known.
        """
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for place, token_id in enumerate(prompt_token_ids):
            logprob = logprobs[place - 1] if 0 < place <= len(logprobs) else None
            self._begin(fields, token_id)
            fields["token_logprobs"].append(None if logprob is None else _finite(logprob.logprob))
            fields["top_logprobs"].append(None if logprob is None else self._top(logprob))
        self._offset = len(text)  # a tokenizer may have normalized it
        return fields

    def _begin(self, fields: dict[str, list[Any]], token_id: int) -> None:
        fields["tokens"].append(self._text(token_id))
        fields["text_offset"].append(self._offset)
        self._offset += len(self._detokenizer.add((token_id,)))

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top[: self._num_top], (logprob.token_id, logprob.logprob)):
            top.setdefault(self._text(token_id), _finite(value))  # of two tokens that read the same, the likelier
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id, bytes_prefix="bytes:")


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two pieces of a :class:`CompletionLogprobs` as one."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat completion, or of a chunk of its stream."""
    content = []
    for logprob in logprobs:
        top = [_chat_token(tokenizer, token_id, value) for token_id, value in logprob.top]
        content.append(_chat_token(tokenizer, logprob.token_id, logprob.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The logprobs of a prompt as vLLM writes them: by token id, the token itself and the most likely ones.

    The first entry is ``None``: nothing is known of what comes before the first token.
    """
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for logprob in logprobs:
        ranked = [(logprob.token_id, logprob.logprob, logprob.rank)]
        ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top[:num_top], start=1)]
        entry: dict[str, dict[str, Any]] = {}
        for token_id, value, rank in ranked:
            text = token_text(tokenizer, token_id)
            entry.setdefault(str(token_id), {"logprob": _finite(value), "rank": rank, "decoded_token": text})
        entries.append(entry)
    return entries


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
