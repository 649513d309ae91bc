"""What the executor asks of a model, however it computes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, LayerKVs
from chairlift.model.config import ModelConfig


class Decoder(Protocol):
    """A decoder-only language model with its weights loaded."""

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]; tells device and dtype."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: LayerKVs,
        attention: AttentionBackend[Any],
        metadata: Any,
        sampled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Computes one step; see :meth:`chairlift.model.llama.CausalLM.forward`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: residual stream [S, hidden_size] to [S, vocab_size] float32."""
        ...
