"""What a step computes, in the terms that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.scheduling.plan import StepPlan


@dataclass(slots=True)
class StepWork:
    """The work of one step.

    Attributes:
        rows: token rows.
        sequences: sequences among them.
        sampled: rows whose next token is sampled.
        context: tokens whose keys and values are read from the cache, summed over the sequences: all before it for a
            sequence that decodes, and what was computed in earlier steps for one that prefills.
        pairs: (query, key) pairs of sequences with more than one row.
        swapped_blocks: KV blocks moved to or from the host.
    """

    rows: int = 0
    sequences: int = 0
    sampled: int = 0
    context: int = 0
    pairs: int = 0
    swapped_blocks: int = 0


def step_work(plan: StepPlan) -> StepWork:
    """What a plan computes. Its loop runs once for each sequence of each step, of a simulation too."""
    rows = sampled = context = pairs = 0
    for chunk in plan.chunks:
        count = len(chunk.token_ids)
        start = chunk.start
        rows += count
        if chunk.sampling is not None:
            sampled += 1
        if count == 1:
            context += start + 1
        else:
            context += start
            pairs += count * start + count * (count + 1) // 2
    return StepWork(rows, len(plan.chunks), sampled, context, pairs, len(plan.swap_in) + len(plan.swap_out))
