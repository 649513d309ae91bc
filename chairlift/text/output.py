"""Tokens from the engine to the text of an answer: one request of the API, with all its sequences.

A streaming handler::

    async with OutputStream(engine, tokenizer, [prompt_token_ids], params) as outputs:
        async for delta in outputs:
            ...  # one event for delta.index; the last of each sequence has a finish_reason
    ...  # outputs.completion_tokens for the usage

and one that answers at once::

    async with OutputStream(engine, tokenizer, [prompt_token_ids], params) as outputs:
        sequences = await outputs.collect()

Leaving the ``async with``, in whatever way, aborts what still runs and waits until it is gone; so does cancelling the
task that is inside. A handler has to see to one of the two when its client hangs up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from chairlift.engine.client import AsyncEngineClient, EngineDeadError
from chairlift.scheduling.plan import RequestTiming, SequenceDelta, TokenLogprob
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.stop import StopMatcher
from chairlift.text.tokenizer import Tokenizer

MOST_RESTARTS = 2
"""How often an answer that is sent as a whole is begun anew on another engine."""


class SequenceError(RuntimeError):
    """The engine could not go on with a sequence. The message is its own."""


# One for each token; frozen ones take three times as long to make. Nobody changes one that is made.
@dataclass(slots=True)
class OutputDelta:
    """New text of one sequence.

    Attributes:
        index: which sequence: the n-th of prompt p has ``p * params.n + n``, as OpenAI counts choices.
        text: what can be shown by now; may be empty while a character or a possible stop string is incomplete.
        token_ids: the tokens that came, whose text may be held back yet.
        finish_reason: ``None`` while it goes on; else "stop", "length" or "abort".
        stop_reason: the stop string, or the token among the request's own ``stop_token_ids``, that ended it; ``None``
            for the model's end-of-sequence tokens and other ends.
        timing: when its stages began, with the first delta and the last that the engine gives.
        logprobs: of each of ``token_ids``, where the request asks for them.
        prompt_logprobs: of the next prompt tokens, from the second one on; all have come when the first token does.
    """

    index: int
    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: RequestTiming | None = None
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()


@dataclass(slots=True)
class SequenceText:
    """A whole sequence; the fields are those of :class:`OutputDelta`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: RequestTiming | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, which must have logprobs; 0 without any."""
        return sum(logprob.logprob for logprob in self.logprobs) / max(1, len(self.logprobs))


def fan_out(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the ``n`` sequences, with ``n=1``.

    The first keeps the seed, so that it is what ``n=1`` would give; the others' are derived from it and their index.
    Without a seed each draws its own from the engine.
    """
    return [replace(params, n=1, seed=_derived_seed(params.seed, index)) for index in range(params.n)]


def _derived_seed(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=SEED_BITS // 8).digest()
    return int.from_bytes(digest, "little")


class SequenceOutput:
    """Turns the engine's deltas of one sequence into text, and ends it at a stop string."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        echo: bool = False,
    ) -> None:
        """Begins a sequence.

        Args:
            index: of the sequence.
            tokenizer: of the model.
            params: what to stop at, and what to show.
            prompt_token_ids: what the sequence goes on from.
            echo: begin with the prompt's text, which is then in :attr:`prompt_text`, and end a character in it that
                the prompt leaves half done.
        """
        self._made_of = (index, tokenizer, params, prompt_token_ids, echo)
        self._index = index
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=() if echo else prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        self.prompt_text = self._detokenizer.add(prompt_token_ids) if echo else ""
        self._stop = StopMatcher(params.stop, keep=params.include_stop_str_in_output)
        self.completion_tokens = 0
        self.cached_tokens = 0

    def anew(self) -> SequenceOutput:
        """One that has been told nothing yet."""
        index, tokenizer, params, prompt_token_ids, echo = self._made_of
        return SequenceOutput(index, tokenizer, params, prompt_token_ids=prompt_token_ids, echo=echo)

    def update(self, delta: SequenceDelta) -> OutputDelta:
        """Takes what the engine says next.

        A result with a ``finish_reason`` where ``delta`` has none means that a stop string was found: the engine must
        be told to abort, and nothing more may be fed. Tokens behind the one that completed it are neither counted nor
        shown, nor, unless the request wants it kept, is the text of a token that ended the sequence itself.

        Raises:
            SequenceError: the engine reports an error.
        """
        if delta.finish_reason == "error":
            raise SequenceError(delta.error or "the engine failed on this sequence")
        if delta.timing is not None:
            self.cached_tokens = delta.timing.cached_tokens
        shown: list[str] = []
        ends_with_stop_token = delta.finish_reason == "stop" and not self._keeps_stop
        for count, token_id in enumerate(delta.token_ids, start=1):
            self.completion_tokens += 1
            if ends_with_stop_token and count == len(delta.token_ids):
                break
            armed = self.completion_tokens > self._min_tokens
            text, matched = self._stop.push(self._detokenizer.add((token_id,)), armed=armed)
            shown.append(text)
            if matched is not None:
                return self._output(delta, shown, delta.token_ids[:count], matched)
        if delta.finish_reason is not None:
            armed = self.completion_tokens > self._min_tokens
            text, matched = self._stop.push(self._detokenizer.finish(), armed=armed)
            shown.append(text)
            if matched is not None:
                return self._output(delta, shown, delta.token_ids, matched)
            shown.append(self._stop.flush())
        return self._output(delta, shown, delta.token_ids, None)

    def _output(
        self, delta: SequenceDelta, shown: list[str], token_ids: Sequence[int], matched: str | None
    ) -> OutputDelta:
        return OutputDelta(
            index=self._index,
            text="".join(shown),
            token_ids=token_ids,
            finish_reason="stop" if matched is not None else delta.finish_reason,
            stop_reason=matched if matched is not None else delta.stop_reason,
            timing=delta.timing,
            logprobs=delta.logprobs[: len(token_ids)],
            prompt_logprobs=delta.prompt_logprobs,
        )


class OutputStream:
    """The sequences of one request, merged as their text comes. See the head of this module for how to use it.

    Within ``async with`` each sequence is read by a task of its own. Iterating ends when all sequences have ended; if
    one fails the others are aborted and its error is raised: :class:`SequenceError`, or
    :class:`~chairlift.engine.client.EngineDeadError`.
    """

    def __init__(
        self,
        engine: AsyncEngineClient,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        echo: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Prepares ``params.n`` sequences for each prompt (token ids); nothing runs before ``async with``.

        ``echo`` is that of :class:`SequenceOutput`.
        """
        self._engine = engine
        self._num_prompts = len(prompts)
        self._priority = priority
        self._cache_salt = cache_salt
        self._sequences: list[tuple[Sequence[int], SamplingParams, SequenceOutput]] = []
        for prompt in prompts:
            for sequence_params in fan_out(params):
                output = SequenceOutput(
                    len(self._sequences),
                    tokenizer,
                    params,
                    prompt_token_ids=prompt,
                    echo=echo,
                )
                self._sequences.append((prompt, sequence_params, output))
        self._unfinished = len(self._sequences)
        self._arrived: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def completion_tokens(self) -> int:
        """Tokens generated by now over all sequences, each up to its finish."""
        return sum(output.completion_tokens for _, _, output in self._sequences)

    @property
    def num_sequences(self) -> int:
        """All of them, ended or not."""
        return len(self._sequences)

    def completion_tokens_of(self, index: int) -> int:
        """Tokens that one sequence has generated by now."""
        return self._sequences[index][2].completion_tokens

    def prompt_text(self, index: int) -> str:
        """How the text of a sequence begins where the prompt is echoed."""
        return self._sequences[index][2].prompt_text

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had, each prompt counted once: by the first of its sequences."""
        every = len(self._sequences) // self._num_prompts
        return sum(output.cached_tokens for _, _, output in self._sequences[::every])

    async def __aenter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        self._tasks = [asyncio.create_task(self._read(*sequence)) for sequence in self._sequences]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        if not self._unfinished:
            raise StopAsyncIteration
        if not self._tasks:
            raise RuntimeError("an OutputStream is iterated within its 'async with'")
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            await self.aclose()
            raise arrived
        if arrived.finish_reason is not None:
            self._unfinished -= 1
        return arrived

    async def collect(self) -> list[SequenceText]:
        """Waits for all sequences and returns them in order of their index.

        Nothing of them has been shown before, so where the engine is lost and there is another one they begin anew.
        """
        for _ in range(MOST_RESTARTS):
            try:
                return await self._collect()
            except EngineDeadError as error:
                if not error.elsewhere:
                    raise
                self._begin_anew()
        return await self._collect()

    def _begin_anew(self) -> None:
        """With outputs as they were; the tasks of before have ended."""
        self._sequences = [(prompt, params, output.anew()) for prompt, params, output in self._sequences]
        self._unfinished = len(self._sequences)
        self._arrived = asyncio.Queue()
        self._start()

    async def _collect(self) -> list[SequenceText]:
        sequences = [SequenceText(index) for index in range(len(self._sequences))]
        texts: list[list[str]] = [[] for _ in sequences]
        async for delta in self:
            sequence = sequences[delta.index]
            texts[delta.index].append(delta.text)
            sequence.token_ids += delta.token_ids
            sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
            sequence.timing = delta.timing or sequence.timing
            sequence.logprobs += delta.logprobs
            sequence.prompt_logprobs += delta.prompt_logprobs
        for sequence, parts in zip(sequences, texts, strict=True):
            sequence.text = "".join(parts)
        return sequences

    async def aclose(self) -> None:
        """Aborts what still runs, and returns when all of it has ended. Safe to call twice; iterating is over."""
        self._unfinished = 0
        for task in self._tasks:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        # Ends, because each task has been cancelled and only closes its stream; a second cancellation of the caller
        # must not leave that half done, so it is passed on only afterwards.
        while running := [task for task in self._tasks if not task.done()]:
            try:
                await asyncio.wait(running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _read(self, prompt: Sequence[int], params: SamplingParams, output: SequenceOutput) -> None:
        """Reads one sequence until it ends. All that goes wrong goes to whoever iterates."""
        try:
            # Called here, so that a task cancelled before its first turn has asked the engine for nothing.
            stream = self._engine.generate(prompt, params, priority=self._priority, cache_salt=self._cache_salt)
            try:
                async for delta in stream:
                    result = output.update(delta)
                    self._arrived.put_nowait(result)
                    if result.finish_reason is not None:
                        return
            finally:
                await _close(stream)
            raise SequenceError("the engine ended a sequence without saying why")
        except Exception as error:
            self._arrived.put_nowait(error)


async def _close(stream: AsyncIterator[SequenceDelta]) -> None:
    """Closes an iterator that can be closed, which is how the engine hears of an abort."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
