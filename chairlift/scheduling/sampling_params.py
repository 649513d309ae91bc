"""What a request asks of the sampler, and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SEED_BITS = 64
MAX_TOKEN_ID = 2**31 - 1
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these a logit leaves what float32 can hold."""
STRUCTURED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


class LogitBias(Mapping[int, float]):
    """Token ids and what is added to their logits. It cannot change, so requests may share it."""

    __slots__ = ("_bias",)

    def __init__(self, bias: Mapping[int, float] | None = None) -> None:
        """Copies ``bias``.

        Raises:
            ValueError: a key is no token id, or a value is not in [-100, 100].
        """
        self._bias = dict(bias or {})
        for token_id, value in self._bias.items():
            if not _is_int(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
                raise ValueError(f"logit_bias must map token ids to numbers, and {token_id!r} is no token id")
            if not (_is_number(value) and abs(value) <= MAX_BIAS):
                raise ValueError(f"logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {value!r} for {token_id}")

    def __getitem__(self, token_id: int) -> float:
        return self._bias[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(frozenset(self._bias.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._bias})"


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """The form that an answer must have.

    Attributes:
        kind: one of :data:`STRUCTURED_KINDS`.
        value: a JSON schema, nothing, a regular expression, a JSON list of strings, or a grammar, in that order.
    """

    kind: str
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in STRUCTURED_KINDS:
            raise ValueError(f"structured must be one of {', '.join(STRUCTURED_KINDS)}; got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names, defaults and meanings are vLLM's.

    Every field is checked when the object is made, so nothing behind the front door has to check again; but what
    depends on the model, such as which token ids there are, is checked by whoever knows the model.

    Attributes:
        n: how many completions of the prompt are wanted; each becomes a request of its own.
        max_tokens: the most tokens to generate; ``None`` means up to the model's length. 0 computes the prompt and
            ends, for the sake of its logprobs.
        min_tokens: end-of-sequence tokens and ``stop_token_ids`` are forbidden, and stop strings not looked for, until
            so many tokens are generated.
        temperature: 0 takes the most likely token; above 0 the logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one's probability, in [0, 1].
        presence_penalty: subtracted from the logit of every token generated before, in [-2, 2].
        frequency_penalty: subtracted as often as the token was generated, in [-2, 2].
        repetition_penalty: divides the positive logits, and multiplies the others, of every token in the prompt or
            generated before; in [0.01, 100], and 1 changes nothing.
        logit_bias: added to the logits of these tokens, in [-100, 100].
        seed: fixes the noise, a pure function of (seed, position); ``None`` draws a fresh seed for each request.
        stop: end as soon as the text contains one of these; the text returned ends before it.
        stop_token_ids: end when one of these is generated.
        ignore_eos: go on past the model's end-of-sequence tokens.
        include_stop_str_in_output: the text returned ends with the stop string, or the token, that ended it.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: for each generated token its log-probability, and those of so many of the most likely ones; ``None``
            for none.
        prompt_logprobs: the same for each token of the prompt but the first.
        structured: the form that the answer must have.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = self.logit_bias
        object.__setattr__(self, "logit_bias", bias if isinstance(bias, LogitBias) else LogitBias(bias) or None)
        for name in ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        self._check_lengths()
        self._check_choice()
        self._check_penalties()
        if any(not s for s in self.stop):
            raise ValueError("stop must not contain an empty string")

    def _check_lengths(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count < 0:
                raise ValueError(f"{name} must be at least 0, got {count}")

    def _check_choice(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be a positive number, or 0 or -1 for no limit, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS:
            raise ValueError(f"seed must fit in {SEED_BITS} bits, got {self.seed}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                raise ValueError(f"{name} must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}], got {value}")
        low, high = REPETITION_PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise ValueError(f"repetition_penalty must be in [{low:g}, {high:g}], got {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no noise is needed."""
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the sequence so far make a difference to the next one's logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether any logit is changed before a token is chosen, other than by the form that the answer must have."""
        return self.penalizes or self.logit_bias is not None or self.min_tokens > 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
