"""What an answer tells of its tokens beside their text: logprobs and ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from chairlift.api.schema import ChatBody
from chairlift.api.stream import encode_json
from chairlift.scheduling.plan import TokenLogprob
from chairlift.text.logprobs import chat_logprobs
from chairlift.text.output import OutputDelta, SequenceText
from chairlift.text.tokenizer import Tokenizer

INLINE_LOGPROBS = 500
"""Tokens whose logprobs are written at once, at some ten microseconds each; a thread writes more, and others run on."""
NOTHING = '"logprobs":null'

T = TypeVar("T")


async def write_logprobs(write: Callable[[], T], sequences: Sequence[SequenceText]) -> T:
    """Calls ``write``, which writes the logprobs of these sequences: here if they are few, else in a thread."""
    count = sum(len(sequence.logprobs) + len(sequence.prompt_logprobs) for sequence in sequences)
    return write() if count <= INLINE_LOGPROBS else await asyncio.to_thread(write)


class TokenReport:
    """Of one choice of a chat completion: what its tokens are, those that no chunk has told yet."""

    def __init__(self, tokenizer: Tokenizer, body: ChatBody) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = bool(body.logprobs)
        self._with_ids = bool(body.return_token_ids)
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []

    def begin(self, prompt_token_ids: Sequence[int]) -> str:
        """The fields of the first chunk of a stream, as JSON without the braces."""
        ids = f',"prompt_token_ids":{encode_json(list(prompt_token_ids))}' if self._with_ids else ""
        return NOTHING + ids

    def add(self, piece: OutputDelta | SequenceText) -> None:
        """Takes what came."""
        if self._with_logprobs:
            self._logprobs += piece.logprobs
        if self._with_ids:
            self._token_ids += piece.token_ids

    def take(self) -> dict[str, Any]:
        """The fields of a choice, or of a chunk, for what came since they were last asked for."""
        fields: dict[str, Any] = {"logprobs": None}
        if self._logprobs:
            fields["logprobs"] = chat_logprobs(self._tokenizer, self._logprobs)
            self._logprobs = []
        if self._with_ids:
            fields["token_ids"], self._token_ids = self._token_ids, []
        return fields

    def take_json(self) -> str:
        """The same as JSON without the braces."""
        return encode_json(self.take())[1:-1] if self._with_logprobs or self._with_ids else NOTHING
