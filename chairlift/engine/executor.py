"""The line between policy and compute: what an executor can hold, and how it runs one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chairlift.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor holds, measured once the weights are loaded, and never changed after.

    Attributes:
        num_blocks: KV blocks on the device.
        block_size: tokens in a block.
        max_num_batched_tokens: the most token rows that a step should have, as asked for or as suits the device.
        eos_token_ids: any of these ends a sequence.
        num_host_blocks: KV blocks on the host for swapping; 0 where there is no swap space.
        max_model_len: the longest sequence, prompt and output together, in tokens.
        vocab_size: token ids are in [0, vocab_size).
        recompute_seconds_per_token, swap_seconds_per_block: measured at start-up where there is swap space: a prompt
            token computed among others, and a block copied one way.
        model: the model's name.
        architecture: its class name in ``transformers``, such as ``LlamaForCausalLM``.
        dtype: precision of weights and activations, such as ``bfloat16``.
        device: such as ``cpu`` or ``cuda:0``.
        attention_backend: name of the attention implementation.
        weight_bytes: bytes of the weights as held.
        kv_bytes_per_token: bytes of keys and values of one token over all layers.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int = 512
    eos_token_ids: tuple[int, ...] = ()
    num_host_blocks: int = 0
    recompute_seconds_per_token: float = 0.0
    swap_seconds_per_block: float = 0.0
    model: str = ""
    architecture: str = ""
    dtype: str = ""
    device: str = ""
    attention_backend: str = ""
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0

    @property
    def num_token_slots(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self.num_blocks * self.block_size


class Executor(Protocol):
    """Runs steps. Local, tensor-parallel and simulated executors are interchangeable."""

    def capacity(self) -> Capacity:
        """Returns what fits; constant."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one step and returns the sampled tokens in plan order."""
        ...

    def close(self) -> None:
        """Frees the device. Safe to call twice."""
        ...
