"""What completions and chat completions share: from a prompt and a checked body to text, within the model's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from chairlift.api.errors import APIError, bad_request, engine_failed, queue_full, shown
from chairlift.api.forms import FormChecker
from chairlift.api.schema import GenerationBody
from chairlift.engine.client import AsyncEngineClient, EngineDeadError
from chairlift.engine.metrics import EngineMetrics
from chairlift.engine.structured import FormError
from chairlift.text.errors import PromptError
from chairlift.text.output import OutputStream, SequenceError
from chairlift.text.tokenizer import Tokenizer

MAX_SEQUENCES = 2048
"""Most choices of one request: prompts times n. Each costs memory from the start, whatever the batch can hold."""
INLINE_CHARACTERS = 8192
"""Longer texts are tokenized in a thread, which the tokenizer lets others run beside: at some hundred nanoseconds a
character, a prompt of megabytes would else stop every stream for a while."""
TEXT_OVERHEAD = 64
"""How much text takes a tokenizer, or a chat template, as long as a text or a message without any."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frontend:
    """What the handlers work with.

    Attributes:
        engine: runs the sequences; counts them in ``metrics``.
        tokenizer: of the engine's model.
        metrics: of the engine.
        served_model_names: what clients may call the model.
        max_body_bytes: larger request bodies are refused.
        forms: finds out whether the form that an answer must have can be followed.
        tool_call_parser: how the model writes calls of tools, as :data:`~chairlift.text.tool_calls.PARSERS` names it;
            ``None`` where that is not known.
        max_open_sequences: most sequences that may be unfinished; ``None`` for any number.
    """

    engine: AsyncEngineClient
    tokenizer: Tokenizer
    metrics: EngineMetrics
    served_model_names: Sequence[str]
    max_body_bytes: int
    forms: FormChecker
    tool_call_parser: str | None = None
    max_open_sequences: int | None = None

    def check_room(self, num_new: int) -> None:
        """Raises a 429 :class:`APIError` if so many more sequences would make the queue longer than it may be."""
        most = self.max_open_sequences
        if most is not None and (unfinished := self.engine.stats().unfinished) + num_new > most:
            raise queue_full(
                f"{unfinished} sequences are unfinished, this request has {num_new}, and at most {most} may be"
            )

    def check_model(self, name: str) -> None:
        """Raises a 404 :class:`APIError` unless a model is served under this name."""
        if name not in self.served_model_names:
            raise APIError(
                404,
                f"the model {shown(name)} does not exist; served here: {', '.join(self.served_model_names)}",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, num_prompts: int, body: GenerationBody, param: str) -> None:
        """Raises a 400 :class:`APIError` if so many prompts, from the field ``param``, make too many choices."""
        n = body.num_sequences
        if num_prompts * n > MAX_SEQUENCES:
            raise bad_request(
                f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices, and the limit is {MAX_SEQUENCES}; "
                "send fewer at once",
                param,
            )

    async def check_form(self, body: GenerationBody) -> None:
        """Raises a 400 :class:`APIError` if the answer must have a form that cannot be followed."""
        if body.structured is not None:
            try:
                await self.forms.check(body.structured)
            except FormError as error:
                message = f"{body.form_field} asks for a form that cannot be followed: {error}"
                raise bad_request(message, body.form_field, code="invalid_form") from None

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Returns the token ids of each text, all from the field ``param``.

        Raises:
            APIError: 400, a text cannot become tokens.
        """
        return await self.text_work(
            lambda: [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts],
            sum(TEXT_OVERHEAD + len(text) for text in texts),
            param,
        )

    async def text_work(self, work: Callable[[], T], characters: int, param: str) -> T:
        """Runs ``work`` on a text of so many characters: here if it is short, in a thread if not."""
        try:
            return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
        except PromptError as error:
            raise bad_request(str(error), param) from error

    def outputs(
        self,
        prompts: Sequence[Sequence[int]],
        body: GenerationBody,
        *,
        max_tokens: int | None,
        param: str,
        echo: bool = False,
    ) -> OutputStream:
        """Checks prompts against the model's limits and prepares their sequences.

        Args:
            prompts: token ids.
            body: what to sample, and how often.
            max_tokens: what the client asked for; ``None`` for up to the model's length.
            param: the field that the prompts come from.
            echo: see :class:`~chairlift.text.output.SequenceOutput`.

        Raises:
            APIError: 400, the request cannot be run. The message has the arithmetic.
        """
        params = body.sampling_params(max_tokens=max_tokens)
        self.check_room(len(prompts) * params.n)
        for prompt in prompts:
            self._check_prompt(prompt, body.requested_max_tokens, param)
        self.check_tokens(params.stop_token_ids, "stop_token_ids")
        self.check_tokens(tuple(params.logit_bias or ()), "logit_bias")
        return OutputStream(
            self.engine,
            self.tokenizer,
            prompts,
            params,
            echo=echo,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )

    def _check_prompt(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> None:
        if not prompt:
            raise bad_request("the prompt is empty; it must have at least one token", param, code="empty_prompt")
        self.check_tokens(prompt, param)
        limit = self.engine.capacity.max_model_len
        new = 1 if max_tokens is None else max_tokens
        if len(prompt) + new > limit:
            wanted = "at least 1 token to generate" if max_tokens is None else f"max_tokens = {shown(max_tokens)}"
            raise bad_request(
                f"the model's limit is {limit} tokens, and the prompt's {len(prompt)} and {wanted} make "
                f"{shown(len(prompt) + new)}; shorten the prompt"
                f"{' or lower max_tokens' if max_tokens else ''}",
                param,
                code="context_length_exceeded",
            )

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raises a 400 :class:`APIError` unless all of them are tokens of the model."""
        vocab_size = self.engine.capacity.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise bad_request(f"{shown(wrong)} is no token id; they are from 0 to {vocab_size - 1}", param)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turns what the engine raises into what the client is told."""
    try:
        yield
    except EngineDeadError as error:
        raise engine_failed(str(error), error.retry_after) from error
    except SequenceError as error:
        raise APIError(500, str(error), code="generation_failed") from error


def usage(prompts: Sequence[Sequence[int]], outputs: OutputStream) -> dict[str, Any]:
    """The ``usage`` of an answer; a prompt counts once, whatever ``n`` is."""
    cached = {"prompt_tokens_details": {"cached_tokens": outputs.cached_tokens}}
    return _usage(sum(map(len, prompts)), outputs.completion_tokens) | cached


def usage_of_choice(prompts: Sequence[Sequence[int]], outputs: OutputStream, index: int) -> dict[str, Any]:
    """The ``usage`` of one choice so far, as a chunk of its stream has it."""
    prompt = prompts[index // (outputs.num_sequences // len(prompts))]
    return _usage(len(prompt), outputs.completion_tokens_of(index))


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
