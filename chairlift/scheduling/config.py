"""Limits and rules that the continuous scheduler keeps to."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("auto", "recompute", "swap")
VICTIM_RULES = ("latest", "least-work")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step, and what to do when memory runs out.

    Attributes:
        max_num_seqs: most sequences computed in a step.
        max_num_batched_tokens: most token rows computed in a step. Longer prompts are computed in chunks.
        long_prefill_token_threshold: prompts with more tokens left than this are long: while others wait for theirs, a
            long one gets at most this many rows of a step. ``None``: long is what does not fit a whole step, and gets
            half of one.
        max_num_partial_prefills: prompts that a step may leave half way; beside so many, others begin only if the step
            completes them.
        policy: "fcfs", or "priority": lower values first, then by arrival.
        preemption_mode: "recompute" throws keys and values away, "swap" moves them to the host, "auto" takes what is
            estimated to cost less. Without room on the host all recompute.
        victim_rule: who gives way among those of the lowest priority that came later: the "latest", or the one that has
            the least computed ("least-work").
        admission_reserve: admit only while what the running are expected to grow by still fits.
        recompute_seconds_per_token, swap_seconds_per_block: measured speeds that "auto" weighs; a block's is one way.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int = 1
    policy: str = "fcfs"
    preemption_mode: str = "auto"
    victim_rule: str = "latest"
    admission_reserve: bool = False
    recompute_seconds_per_token: float = 0.0
    swap_seconds_per_block: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.long_prefill_token_threshold is not None and self.long_prefill_token_threshold < 1:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 1, got {self.long_prefill_token_threshold}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every sequence of a full batch can decode a token"
            )
        for name, choices in (
            ("policy", POLICIES),
            ("preemption_mode", PREEMPTION_MODES),
            ("victim_rule", VICTIM_RULES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
