"""What the executor asks of a model, however it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, LayerKVs
from chairlift.model.config import ModelConfig


class ModelOutput(NamedTuple):
    """What a model makes of a step. Fused models take it all back at the next one, but for ``best``.

    Attributes:
        hidden: [T, hidden_size], the residual stream behind the last layer.
        logits: [S, vocab_size] float32, scores of the token that follows each of the sampled rows. Empty where ``best``
            is known and they are not wanted.
        best: for each sampled row the token of the largest logit, the lowest of those that tie; -1 where that logit is
            not finite or any is NaN. ``None`` if the model does not find them.
    """

    hidden: Tensor
    logits: Tensor
    best: Sequence[int] | None = None


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
        wants_logits: bool = True,
    ) -> ModelOutput:
        """Computes one step; see :meth:`chairlift.model.llama.CausalLM.forward`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: residual stream [S, hidden_size] to [S, vocab_size] float32."""
        ...
