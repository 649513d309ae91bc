"""What a request asks of the sampler, and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names, defaults and meanings are vLLM's.

    Every field is checked when the object is made, so nothing behind the front door has to check again.

    Attributes:
        n: how many completions of the prompt are wanted; each becomes a request of its own.
        max_tokens: the most tokens to generate; ``None`` means up to the model's length.
        temperature: 0 takes the most likely token; above 0 the logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one's probability, in [0, 1].
        seed: fixes the noise, a pure function of (seed, position); ``None`` draws a fresh seed for each request.
        stop: end as soon as the text contains one of these; the text returned ends before it.
        stop_token_ids: end when one of these is generated.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("n", "max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
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
        if any(not s for s in self.stop):
            raise ValueError("stop must not contain an empty string")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no noise is needed."""
        return self.temperature == 0
