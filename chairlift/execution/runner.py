"""Runs one step of a model: plan, batch, forward pass, logits of the sampled rows, tokens."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.execution.batch import build_batch
from chairlift.execution.kv_store import KVStore
from chairlift.execution.sampler import NonFiniteLogitsError, sample
from chairlift.model.attention.base import AttentionBackend
from chairlift.model.llama import CausalLM
from chairlift.scheduling.plan import StepPlan


class ModelRunner:
    """A model with its attention backend and its KV cache. Keeps nothing of a plan once it has run."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend[Any],
        kv: KVStore,
        *,
        block_size: int,
        device: torch.device,
        host: KVStore | None = None,
    ) -> None:
        self.host = host
        self.model = model
        self.attention = attention
        self.kv = kv
        self.block_size = block_size
        self.device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> tuple[list[int], dict[str, str]]:
        """Computes a plan.

        Returns:
            Its sampled tokens, in plan order, and by request id why the model's scores for it are nonsense, where they
            are: the token in its place is then one of no meaning.
        """
        if plan.swap_out or plan.swap_in:
            self._swap(plan)
        if not plan.chunks:
            return [], {}
        batch = build_batch(plan, self.block_size, self.device)
        metadata = self.attention.prepare(batch.layout)
        hidden = self.model(batch.token_ids, batch.positions, self.kv.layers, self.attention, metadata)
        if not batch.sampled_ids:
            return [], {}
        logits = self.model.logits(hidden[batch.sampled_rows])
        try:
            return sample(logits, batch.sampling, batch.sample_positions), {}
        except NonFiniteLogitsError as error:
            # The others of the batch, whose rows are sound, lose nothing.
            failed = {}
            for row in error.rows:
                of = f"request {batch.sampled_ids[row]} in step {plan.step}"
                failed[batch.sampled_ids[row]] = str(NonFiniteLogitsError([row], of))
                logits[row] = 0
            return sample(logits, batch.sampling, batch.sample_positions), failed

    def _swap(self, plan: StepPlan) -> None:
        """Moves blocks before anything is written: a block that is swapped out may be somebody else's in this step."""
        if self.host is None:
            raise RuntimeError(f"step {plan.step} swaps, but there is no swap space")
        if plan.swap_out:
            self.host.copy_from(self.kv, plan.swap_out)
        if plan.swap_in:
            self.kv.copy_from(self.host, plan.swap_in)
