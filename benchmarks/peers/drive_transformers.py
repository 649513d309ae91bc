"""transformers: ``generate`` on left-padded static batches, each to its longest output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from driver import Answer, Request, Settings, serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

PADDING = 0  # masked, so any token will do


class Transformers:
    """Batches in the order of the requests. Options: ``batch_size``, ``attn_implementation``."""

    def __init__(self, settings: Settings) -> None:
        if settings.precision != "bf16":
            raise ValueError(f"transformers is compared in bf16 only, not in {settings.precision}")
        torch.set_num_threads(settings.cores)
        transformers.utils.logging.disable_progress_bar()
        self.batch_size = min(settings.max_num_seqs, settings.options.get("batch_size", 16))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            Path(settings.model) / "safetensors",
            dtype=torch.bfloat16,
            attn_implementation=settings.options.get("attn_implementation", "sdpa"),
        ).eval()
        self.description = f"transformers {transformers.__version__}, static batches of {self.batch_size}"

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        answers: list[Answer] = []
        for first in range(0, len(requests), self.batch_size):
            answers += self._batch(requests[first : first + self.batch_size])
        return answers

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Request]) -> list[Answer]:
        width = max(len(request.prompt) for request in batch)
        length = max(request.out for request in batch)
        ids = torch.full((len(batch), width), PADDING)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=PADDING,
        )
        new = output[:, width:]  # of which each row's first `out` tokens are its answer, the rest is waste
        return [
            Answer(len(new[row, : request.out]), int(mask[row].sum()), int(new[row, 0]))
            for row, request in enumerate(batch)
        ]

    def close(self) -> None:
        del self.model


if __name__ == "__main__":
    serve(Transformers)
