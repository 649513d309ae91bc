"""Drives an executor without a scheduler: every sequence in blocks of its own, prompts in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.engine.executor import Executor
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams


@dataclass
class Running:
    request_id: str
    tokens: list[int]
    prompt_length: int
    table: list[int]
    params: SamplingParams
    computed: int = 0

    def next_chunk(self, size: int) -> SequenceChunk:
        tokens = self.tokens[self.computed : self.computed + size]
        last = self.computed + len(tokens) == len(self.tokens)
        return SequenceChunk(self.request_id, tokens, self.computed, self.table, self.params if last else None)


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int = 1 << 30,
    params: Sequence[SamplingParams] | None = None,
) -> list[list[int]]:
    """Runs all prompts together, the i-th from step i on, and returns what each generated."""
    block_size = executor.capacity().block_size
    per_sequence = -(-(max(map(len, prompts)) + num_tokens) // block_size)
    assert per_sequence * len(prompts) <= executor.capacity().num_blocks
    sequences = [
        Running(
            str(i),
            list(prompt),
            len(prompt),
            # Backwards and interleaved: no order of blocks is taken for granted.
            list(range(per_sequence * len(prompts) - 1 - i, -1, -len(prompts))),
            params[i] if params else SamplingParams(temperature=0, seed=0),
        )
        for i, prompt in enumerate(prompts)
    ]
    step = 0
    while running := [s for s in sequences[: step + 1] if len(s.tokens) < s.prompt_length + num_tokens]:
        chunks = [s.next_chunk(chunk) for s in running]
        result = executor.execute(StepPlan(step, chunks, RowCounts()))
        assert result.elapsed > 0
        tokens = iter(result.token_ids)
        for s, c in zip(running, chunks, strict=True):
            s.computed += len(c.token_ids)
            if c.sampling is not None:
                s.tokens.append(next(tokens))
        assert next(tokens, None) is None
        step += 1
    return [s.tokens[s.prompt_length :] for s in sequences]


def with_seeds(params: SamplingParams, n: int) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(n)]
