"""``POST /v1/completions``: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.api.body import read_json
from chairlift.api.generation import Frontend, engine_errors, usage, usage_of_choice
from chairlift.api.report import write_logprobs
from chairlift.api.schema import COMPLETION_MAX_TOKENS, CompletionBody, parse
from chairlift.api.stream import DONE, Answer, EventStream, encode_json, ending_of, unless_disconnected
from chairlift.scheduling.plan import TokenLogprob
from chairlift.text.logprobs import CompletionLogprobs, joined, prompt_logprobs
from chairlift.text.output import OutputDelta, OutputStream, SequenceText
from chairlift.text.tokenizer import Tokenizer


async def create_completion(frontend: Frontend, request: Request) -> Response:
    """Answers one request; the choices of prompt p are ``p * n`` to ``p * n + n - 1``.

    Raises:
        APIError: what the client is to be told instead.
        ClientDisconnect: the client hung up; nothing of its request is left.
    """
    body = parse(CompletionBody, await read_json(request, frontend.max_body_bytes))
    frontend.check_model(body.model)
    frontend.check_choices(len(body.prompt), body, "prompt")
    await frontend.check_form(body)
    prompts = await _token_ids(frontend, body)
    max_tokens = COMPLETION_MAX_TOKENS if body.requested_max_tokens is None else body.requested_max_tokens
    # A text is echoed as it was written; of tokens only their text is known.
    echo = body.echoes and not isinstance(body.prompt[0], str)
    outputs = frontend.outputs(prompts, body, max_tokens=max_tokens, param="prompt", echo=echo)
    choices = [_ChoiceWriter(frontend.tokenizer, body, prompts, outputs, i) for i in range(outputs.num_sequences)]
    answer = Answer("cmpl", body.model)
    if body.stream:
        return EventStream(_chunks(outputs, prompts, choices, answer, body))
    return JSONResponse(await unless_disconnected(request.receive, _whole(outputs, prompts, choices, answer, body)))


async def _token_ids(frontend: Frontend, body: CompletionBody) -> list[list[int]]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in body.prompt if not isinstance(prompt, str)]
    return await frontend.encode(texts, "prompt", add_special_tokens=body.add_special_tokens is not False)


class _ChoiceWriter:
    """Writes one choice, whole or piece by piece, with the prompt before it where that is echoed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        prompts: Sequence[Sequence[int]],
        outputs: OutputStream,
        index: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        prompt_index = index // body.num_sequences
        self._prompt = prompts[prompt_index]
        given = body.prompt[prompt_index]
        self._echo = (given if isinstance(given, str) else outputs.prompt_text(index)) if body.echoes else ""
        self._begun = False
        self._prompt_logprobs: list[TokenLogprob] = []
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                tokenizer,
                body.logprobs,
                prompt_token_ids=() if body.echoes else self._prompt,
                skip_special_tokens=body.skip_special_tokens is not False,
            )
        self.plain = not (body.echoes or body.return_token_ids or body.logprobs is not None)

    def write(self, piece: OutputDelta | SequenceText) -> dict[str, Any] | None:
        """The fields for what came, or ``None`` where the piece has nothing to show."""
        self._prompt_logprobs += piece.prompt_logprobs
        if not (piece.token_ids or piece.finish_reason):
            return None
        begins, self._begun = not self._begun, True
        fields: dict[str, Any] = {"text": self._echo + piece.text if begins else piece.text, "logprobs": None}
        if self._logprobs is not None:
            echoed = None
            if begins and self._body.echoes:
                echoed = self._logprobs.write_echo(self._prompt, self._prompt_logprobs, self._echo)
            written = self._logprobs.write(piece.logprobs)
            fields["logprobs"] = written if echoed is None else joined(echoed, written)
        if begins and self._body.prompt_logprobs is not None:
            num_top = self._body.prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt_logprobs, num_top)
        if self._body.return_token_ids:
            fields |= {"prompt_token_ids": list(self._prompt) if begins else None, "token_ids": list(piece.token_ids)}
        return fields


async def _whole(
    outputs: OutputStream,
    prompts: Sequence[Sequence[int]],
    writers: Sequence[_ChoiceWriter],
    answer: Answer,
    body: CompletionBody,
) -> dict[str, Any]:
    with engine_errors():
        async with outputs:
            sequences = await outputs.collect()
    chosen = _best(sequences, body)

    def write() -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                **(writers[sequence.index].write(sequence) or {}),
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            for index, sequence in enumerate(chosen)
        ]

    choices = await write_logprobs(write, chosen)
    return answer.head("text_completion") | {"choices": choices, "usage": usage(prompts, outputs)}


def _best(sequences: Sequence[SequenceText], body: CompletionBody) -> Sequence[SequenceText]:
    """The n of each prompt whose tokens are likeliest on average; in order of index where none is left out."""
    n, every = body.n or 1, body.num_sequences
    if n == every:
        return sequences
    groups = (sequences[first : first + every] for first in range(0, len(sequences), every))
    return [
        sequence
        for group in groups
        for sequence in sorted(group, key=lambda sequence: sequence.mean_logprob, reverse=True)[:n]
    ]


async def _chunks(
    outputs: OutputStream,
    prompts: Sequence[Sequence[int]],
    writers: Sequence[_ChoiceWriter],
    answer: Answer,
    body: CompletionBody,
) -> AsyncGenerator[bytes, None]:
    events = answer.events("text_completion", include_usage=body.include_usage)
    with engine_errors():
        async with outputs:
            async for delta in outputs:
                fields = _chunk_fields(delta, writers[delta.index])
                if fields is not None:
                    so_far = usage_of_choice(prompts, outputs, delta.index) if body.continuous_usage else None
                    yield events.choice(f'"index":{delta.index},{fields},{ending_of(delta)}', so_far)
    if body.include_usage:
        yield events.usage(usage(prompts, outputs))
    yield DONE


def _chunk_fields(delta: OutputDelta, writer: _ChoiceWriter) -> str | None:
    """The fields of a choice in a chunk, as JSON without the braces."""
    if writer.plain:
        return f'"text":{encode_json(delta.text)},"logprobs":null' if delta.text or delta.finish_reason else None
    fields = writer.write(delta)
    return None if fields is None else encode_json(fields)[1:-1]
