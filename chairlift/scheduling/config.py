"""Limits that a scheduler keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: most sequences computed in a step.
        max_num_batched_tokens: most token rows computed in a step. Longer prompts are computed in chunks.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every sequence of a full batch can decode a token"
            )
