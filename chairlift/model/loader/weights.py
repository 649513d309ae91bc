"""Puts the tensors of a checkpoint where the model wants them, whatever file they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from chairlift.model.llama import CausalLM
from chairlift.model.source import ModelError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old Llama checkpoints store the rotary frequencies, which follow from the configuration.
DERIVED = ".rotary_emb.inv_freq"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_NAMES = 8


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which only what is asked for is read."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        ...

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The values of a part; there is a slice, with bounds, for each dimension."""
        ...


@torch.no_grad()
def load_weights(model: CausalLM, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    """Copies each tensor into its place, converted to the model's dtype and device, and no more than one at a time.

    Args:
        model: with uninitialized weights.
        tensors: by name in ``transformers``, in any order.

    Raises:
        ModelError: tensors are missing, unexpected, or of the wrong shape; they are named.
    """
    slots = model.slots()
    tied = model.config.tie_word_embeddings
    filled: set[str] = set()
    unexpected: list[str] = []
    for name, stored in tensors:
        if name.endswith(DERIVED):
            continue
        if (slot := slots.get(name)) is None:
            unexpected.append(name)
            continue
        if tuple(stored.shape) != slot.shape:
            raise ModelError(
                f"tensor {name} has the shape {list(stored.shape)}; the model's configuration gives {list(slot.shape)}"
            )
        tensor = stored.read(slot.index)
        if tensor.dtype not in DTYPES:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype}; quantized safetensors are not supported")
        if tied and name in (HEAD, EMBEDDING) and filled & {HEAD, EMBEDDING}:
            if not torch.equal(slot.tensor, tensor.to(slot.tensor)):
                raise ModelError(
                    f"{HEAD} and {EMBEDDING} differ, though config.json says that they are one (tie_word_embeddings); "
                    "set it to false there"
                )
        else:
            slot.tensor.copy_(tensor)
        filled.add(name)
    if tied and filled & {HEAD, EMBEDDING}:
        filled |= {HEAD, EMBEDDING}
    _refuse("lacks", [name for name in slots if name not in filled])
    _refuse("has, and the model's configuration has no place for,", unexpected)


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise ModelError(f"the checkpoint {problem} {', '.join(names[:MOST_NAMES])}{more}")
