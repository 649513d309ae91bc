"""An executor without a network whose tokens depend on every slot of the KV cache that a step may read.

A slot holds the (position, token id) written to it. To sample, the executor reads the whole sequence back through its
block table: a wrong block, a lost write, a block that two sequences write to, all change the tokens or fail at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.executor import Capacity
from chairlift.scheduling.plan import SequenceChunk, StepPlan, StepResult

VOCAB_SIZE = 1000
EOS = 999


class ExecutorFailureError(Exception):
    """What a failing executor raises."""


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The token that follows, a pure function of the sequence and the seed. Never ``EOS``, but for one case in 61."""
    mixed = hash((seed, tuple(tokens)))
    return EOS if mixed % 61 == 0 else mixed % EOS


def continuation(
    prompt: Sequence[int], seed: int, max_tokens: int, stop_token_ids: Sequence[int] = (EOS,)
) -> list[int]:
    """What a request must be answered, whatever it shares its steps with."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


class CheckingExecutor:
    def __init__(self, num_blocks: int, block_size: int, max_model_len: int = 10_000, num_host_blocks: int = 0) -> None:
        self._capacity = Capacity(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            num_host_blocks=num_host_blocks,
        )
        self._device = [[None] * block_size for _ in range(num_blocks)]
        self._host = [[None] * block_size for _ in range(num_host_blocks)]
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.poisoned: set[str] = set()  # requests for which nothing can be sampled

    def capacity(self) -> Capacity:
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise ExecutorFailureError
        self.plans.append(plan)
        for device, host in plan.swap_out:
            self._host[host] = list(self._device[device])
        for host, device in plan.swap_in:
            self._device[device] = list(self._host[host])
        for chunk in plan.chunks:
            self._write(chunk)
        tokens = [self._sample(chunk) for chunk in plan.chunks if chunk.sampling is not None]
        failed = {c.request_id: "poisoned" for c in plan.chunks if c.sampling and c.request_id in self.poisoned}
        return StepResult(tokens, elapsed=0.01, failed=failed)

    def close(self) -> None:
        pass

    def _write(self, chunk: SequenceChunk) -> None:
        size = self._capacity.block_size
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self._device[chunk.block_table[position // size]][position % size] = (position, token)

    def _sample(self, chunk: SequenceChunk) -> int:
        size = self._capacity.block_size
        stored = [self._device[chunk.block_table[p // size]][p % size] for p in range(chunk.sample_position)]
        assert [entry and entry[0] for entry in stored] == list(range(chunk.sample_position)), (chunk, stored)
        return next_token([token for _, token in stored], chunk.sampling.seed)
