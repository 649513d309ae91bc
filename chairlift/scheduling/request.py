"""The life of one sequence, told by two numbers: how many tokens it has, and how many are computed.

There is no prefill phase and no decode phase. A step gives a request some of the ``num_tokens − num_computed_tokens``
that it lacks: many while its prompt is new, one once it generates. A preempted request is then nothing special, only a
longer prompt.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from chairlift.scheduling.plan import (
    PromptTargets,
    RequestTiming,
    RowCounts,
    SequenceContext,
    StepResult,
    TokenLogprob,
)
from chairlift.scheduling.sampling_params import SamplingParams


class Status(enum.IntEnum):
    """Where a request stands. Ordered: everything above ``RUNNING`` has ended."""

    WAITING = 0  # never planned yet
    PREEMPTED = 1  # was running; its blocks were taken, and it waits to be computed again
    SWAPPED = 2  # was running; what is computed of it lies on the host
    RUNNING = 3  # owns blocks on the device
    FINISHED_STOP = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORT = 6

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self > Status.RUNNING


FINISH_REASONS = {Status.FINISHED_STOP: "stop", Status.FINISHED_LENGTH: "length", Status.FINISHED_ABORT: "abort"}


class Request:
    """One sequence: a prompt, and the tokens generated so far.

    Attributes:
        request_id: the engine's own, never a client's.
        params: how to sample and when to stop; ``params.seed`` is set.
        rank: its place among all requests: a class, lower first, and in it the order of arrival. Never changes.
        cache_salt: only requests with the same one share computed prompts with it.
        block_hashes: of the full blocks of ``token_ids``, as far as anybody has asked (see ``PrefixCache``).
        token_ids: prompt and output together.
        num_prompt_tokens: how many of them are prompt.
        max_tokens: how long ``token_ids`` may become.
        num_computed_tokens: tokens whose keys and values are in the cache.
        num_once_computed: the most that ever were; rows below it are computed a second time after a preemption.
        num_prompt_logprobs: prompt tokens whose logprobs are no longer due: have been told, or will never be asked.
        context: what its logits are adjusted by, if they are.
        status: where it stands.
        timing: when its stages began.
    """

    __slots__ = (
        "request_id",
        "params",
        "priority",
        "rank",
        "cache_salt",
        "block_hashes",
        "token_ids",
        "num_prompt_tokens",
        "max_tokens",
        "num_computed_tokens",
        "num_once_computed",
        "num_prompt_logprobs",
        "context",
        "status",
        "timing",
        "_stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Collection[int] = (),
        arrival: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError("a prompt needs at least one token")
        if params.seed is None:
            raise ValueError("params.seed must be set before a request is made: sampling keeps no state of its own")
        self.request_id = request_id
        self.params = params
        self.priority = priority
        self.rank = (0, 0)
        self.cache_salt = cache_salt
        self.block_hashes: list[bytes] = []
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_once_computed = 0
        self.status = Status.WAITING
        self.timing = RequestTiming(arrival)
        own_stops = frozenset(params.stop_token_ids)
        all_stops = own_stops | frozenset(eos_token_ids)
        self._stop_token_ids = own_stops if params.ignore_eos else all_stops
        # Nothing is known of what comes before the first token, so its logprob is not due.
        self.num_prompt_logprobs = self.num_prompt_tokens if params.prompt_logprobs is None else 1
        self.context = (
            SequenceContext(self.token_ids, self.num_prompt_tokens, all_stops) if params.adjusts_logits else None
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence so far."""
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that must be computed before the next one can be sampled; at least 1 while unfinished."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is missing, and it was generated."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """The most tokens that need not be computed if they were before, for this request or another.

        The last one is, or there would be nothing to sample the next one from; and so is the one before each prompt
        token whose logprob is due.
        """
        return (self.num_prompt_logprobs if self.wants_prompt_logprobs else len(self.token_ids)) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are still due."""
        return self.num_prompt_logprobs < self.num_prompt_tokens

    def prompt_targets(self, start: int, end: int) -> PromptTargets | None:
        """The prompt tokens whose logprobs come out of computing positions ``start`` to ``end``, if any are due."""
        first, last = max(start + 1, self.num_prompt_logprobs), min(end + 1, self.num_prompt_tokens)
        if first >= last or self.params.prompt_logprobs is None:
            return None
        return PromptTargets(self.params.prompt_logprobs, first - 1 - start, self.token_ids[first:last])

    def take_prompt_logprobs(self, result: StepResult) -> tuple[TokenLogprob, ...]:
        """Notes that the logprobs that a step was to find are no longer due, and returns them."""
        told = tuple(result.prompt_logprobs[self.request_id])
        self.num_prompt_logprobs += len(told)
        return told

    def complete_without_tokens(self) -> bool:
        """Whether the prompt is computed and nothing else was wanted, with ``status`` set then."""
        if self.num_computed_tokens < self.max_tokens:
            return False
        self.status = Status.FINISHED_LENGTH
        return True

    def count_rows(self, rows: RowCounts, start: int, count: int) -> None:
        """Adds the rows for positions ``start`` to ``start + count`` to ``rows``, each under its kind."""
        if start >= self.num_once_computed and start >= self.num_prompt_tokens:
            rows.decode += count
            return
        again = max(0, min(start + count, self.num_once_computed) - start)
        prompt = max(0, min(start + count, self.num_prompt_tokens) - start - again)
        rows.recomputed += again
        rows.prefill += prompt
        rows.decode += count - again - prompt

    def mark_computed(self, num_tokens: int) -> None:
        """Notes that the keys and values of the first ``num_tokens`` tokens are in the cache."""
        self.num_computed_tokens = num_tokens
        if num_tokens > self.num_once_computed:
            self.num_once_computed = num_tokens

    def append(self, token_id: int) -> bool:
        """Takes a sampled token and returns whether it is the last one, with ``status`` set to say why."""
        self.token_ids.append(token_id)
        if token_id in self._stop_token_ids:
            self.status = Status.FINISHED_STOP
        elif len(self.token_ids) >= self.max_tokens:
            self.status = Status.FINISHED_LENGTH
        else:
            return False
        return True

    def stop_reason(self) -> int | None:
        """The token that ended it, where the request itself named that token."""
        last = self.token_ids[-1]
        return last if self.status is Status.FINISHED_STOP and last in self.params.stop_token_ids else None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt {self.num_prompt_tokens}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, at most {self.max_tokens})"
        )
