"""Tokens to text, as they come.

A character may be spread over several tokens, so a token's text cannot be known by itself, and decoding everything
again for each token costs quadratic time. Here the bytes of the tokens run through one incremental UTF-8 decoder,
which holds back at most the three bytes of an unfinished character: linear time, nothing is ever taken back, and
bytes that are not UTF-8 become U+FFFD (one for each maximal subpart, Unicode 15, section 3.9) instead of an error.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence.

    All texts returned, joined, are ``tokenizer.decode`` of all tokens added, where no prompt is given. With a prompt
    they are what those tokens add to its text: SentencePiece's space before the first word is kept then.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder(errors="replace")
        self._at_start = tokenizer.strips_first_space and not any(self._bytes(i) for i in prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that is certain by now, which may be empty."""
        raw = b"".join(map(self._bytes, token_ids))
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """Returns what is held back: U+FFFD for a character that never became complete, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
