"""What can go wrong between text and tokens."""

from __future__ import annotations


class TokenizerError(ValueError):
    """The model's tokenizer cannot be used: its files are missing, broken or of an unknown kind.

    Raised while a model is loaded. The message says what to change.
    """


class PromptError(ValueError):
    """The text of one request cannot become tokens. Meant for a 400; the message is for the client."""


class ChatTemplateError(PromptError):
    """The model's chat template is missing, or refuses or fails on these messages."""
