"""Offline batches: the engine in the caller's own thread, without a server."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, cast

from chairlift.config import EngineConfig
from chairlift.engine.build import build_core
from chairlift.engine.core import AbortRequest, AddRequest, Command, StepOutput, check_vocabulary
from chairlift.model.source import resolve
from chairlift.scheduling.plan import RequestTiming, TokenLogprob
from chairlift.scheduling.sampling_params import SEED_BITS, SamplingParams
from chairlift.text.errors import PromptError
from chairlift.text.output import SequenceOutput, fan_out
from chairlift.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One answer.

    Attributes:
        index: which of the ``n`` answers to its prompt.
        text: without the stop string, end-of-sequence token and special tokens, unless the parameters keep them.
        token_ids: all tokens generated up to the end, the one that ended it included.
        finish_reason: "stop" or "length".
        stop_reason: the stop string, or the token among ``stop_token_ids``, that ended it.
        timing: when its stages began, in seconds of the monotonic clock.
        logprobs: of each of ``token_ids``, if the parameters ask for them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: RequestTiming | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class GenerationOutput:
    """A prompt and the answers to it.

    Attributes:
        prompt: as given; ``None`` where it was given as token ids.
        prompt_token_ids: what the model read.
        outputs: one for each of ``params.n``.
        prompt_logprobs: of each prompt token but the first, if the parameters ask for them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """A sequence on its way."""

    result: GenerationOutput
    completion: Completion
    output: SequenceOutput


class LLM:
    """A model, for batches that are at hand as a whole. All prompts share one continuously batched engine.

    >>> llm = LLM("smollm2")
    >>> [answer] = llm.generate("A chairlift", SamplingParams(max_tokens=8, temperature=0))
    >>> print(answer.outputs[0].text)

    Not safe to use from two threads at once.
    """

    def __init__(self, model: str = EngineConfig.model, **options: Any) -> None:
        """Loads ``model``; ``options`` are the fields of :class:`EngineConfig`.

        Raises:
            ConfigError: options that cannot work.
            ModelError: the model cannot be had, or is not one of those supported.
        """
        self._open(EngineConfig(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Loads what ``config`` says."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(resolve(config.model, config.revision))
        self._commands: list[Command] = []
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)  # noqa: S311 - noise for sampling, not a secret
        self.core = build_core(config, self._drain)

    def _drain(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Completes each prompt, all in one batch, and returns the answers in order.

        Args:
            prompts: one text, one list of token ids, or several of either.
            params: for all prompts, or one for each; by default vLLM's (16 tokens at temperature 1).

        Raises:
            PromptError: a prompt is empty, too long, or holds token ids that the model does not have. Nothing has run.
            ValueError: prompts and parameters do not match in number, or parameters name tokens that are not there.
        """
        prompts = _as_list(prompts)
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(each)} sampling parameters; give one for all, or one each"
            )
        encoded = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        for number, (token_ids, prompt_params) in enumerate(zip(encoded, each, strict=True)):
            self._check(number, token_ids, prompt_params)
        results, running = [], {}
        for prompt, token_ids, prompt_params in zip(prompts, encoded, each, strict=True):
            result = GenerationOutput(prompt if isinstance(prompt, str) else None, token_ids, [])
            for index, sequence_params in enumerate(fan_out(prompt_params)):
                result.outputs.append(Completion(index))
                request_id = self._submit(token_ids, sequence_params)
                text = SequenceOutput(index, self.tokenizer, sequence_params, prompt_token_ids=token_ids)
                running[request_id] = _Running(result, result.outputs[-1], text)
            results.append(result)
        self._run(running)
        return results

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Continues one conversation, or several, through the model's chat template. Otherwise as :meth:`generate`."""
        several = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        prompts = [self.tokenizer.apply_chat_template(messages) for messages in several]  # type: ignore[arg-type]
        # The template writes the special tokens itself.
        encoded = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        results = self.generate(encoded, params)
        for result, prompt in zip(results, prompts, strict=True):
            result.prompt = prompt
        return results

    def _check(self, number: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        capacity = self.core.executor.capacity()
        check_vocabulary(params, capacity.vocab_size)
        if not token_ids:
            raise PromptError(f"prompt {number} is empty")
        if len(token_ids) + (params.max_tokens != 0) > capacity.max_model_len:
            raise PromptError(
                f"prompt {number} has {len(token_ids)} tokens, which leaves no room to generate within the model's "
                f"length of {capacity.max_model_len}"
            )
        if not all(isinstance(token, int) and 0 <= token < capacity.vocab_size for token in token_ids):
            raise PromptError(f"prompt {number} holds token ids outside of [0, {capacity.vocab_size})")

    def _submit(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(SEED_BITS))
        request_id = str(next(self._ids))
        self._commands.append(AddRequest(request_id, token_ids, params, arrival=time.monotonic()))
        return request_id

    def _run(self, running: dict[str, _Running]) -> None:
        try:
            while running:
                output = self.core.step()
                self._take(output, running)
                if output.wait_until is not None:
                    time.sleep(max(0.0, output.wait_until - time.monotonic()))
        finally:
            # Ctrl-C, or a sequence the engine refused: the others must not linger in the scheduler.
            self._commands.extend(AbortRequest(request_id) for request_id in running)
            self.core.take_commands(StepOutput())

    def _take(self, output: StepOutput, running: dict[str, _Running]) -> None:
        for delta in output.deltas:
            sequence = running.get(delta.request_id)
            if sequence is None:
                continue
            if delta.finish_reason == "error":
                raise ValueError(delta.error)
            new, completion = sequence.output.update(delta), sequence.completion
            completion.text += new.text
            completion.token_ids.extend(new.token_ids)
            completion.timing = new.timing or completion.timing
            completion.logprobs.extend(new.logprobs)
            if completion.index == 0:  # the others' are the same
                sequence.result.prompt_logprobs.extend(new.prompt_logprobs)
            if new.finish_reason is not None:
                completion.finish_reason, completion.stop_reason = new.finish_reason, new.stop_reason
                del running[delta.request_id]
                if delta.finish_reason is None:  # a stop string, of which the engine knows nothing
                    self._commands.append(AbortRequest(delta.request_id))

    def close(self) -> None:
        """Frees the model. Safe to call twice."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
