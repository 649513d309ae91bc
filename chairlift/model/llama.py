"""The decoder that Llama, Mistral, Qwen2, Qwen3 and SmolLM2 share. What sets them apart is in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from chairlift.model.attention.base import AttentionBackend, LayerKV, M
from chairlift.model.base import ModelOutput
from chairlift.model.config import ModelConfig
from chairlift.model.layers import Linear, RMSNorm, RowLinear, silu_and_mul, weight
from chairlift.model.parallel import Communicator, OneRank, Partition, Slot, Span
from chairlift.model.rope import make_rotary_embedding, rotate


class Attention(nn.Module):
    """Self-attention with rotary positions, over a paged KV cache."""

    def __init__(
        self,
        part: Partition,
        ranks: Communicator,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        config = part.config
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sliding_window = sliding_window
        hidden = Span.whole(config.hidden_size)
        q, kv = part.heads.times(self.head_dim), part.kv_heads.times(self.head_dim)
        self.qkv = Linear(hidden, q, kv, kv, bias=config.qkv_bias, dtype=dtype, device=device)
        self.o = RowLinear(q, hidden, ranks=ranks, bias=config.o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, attention: AttentionBackend[M], metadata: M
    ) -> Tensor:
        """[T, hidden] to [T, hidden]; ``kv`` is changed in place."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = attention.forward(q, k, v, kv, metadata, self.sliding_window)
        output: Tensor = self.o(attended.flatten(1))
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around the residual stream."""

    def __init__(
        self,
        part: Partition,
        ranks: Communicator,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        config = part.config
        hidden, inner, bias = Span.whole(config.hidden_size), part.inner, config.mlp_bias
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(part, ranks, sliding_window, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, inner, inner, bias=bias, dtype=dtype, device=device)
        self.down = RowLinear(inner, hidden, ranks=ranks, bias=bias, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, attention: AttentionBackend[M], metadata: M
    ) -> Tensor:
        """[T, hidden] to [T, hidden]; ``kv`` is changed in place."""
        x = x + self.attention(self.attention_norm(x), cos, sin, kv, attention, metadata)
        output: Tensor = x + self.down(silu_and_mul(self.gate_up(self.mlp_norm(x))))
        return output

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Where a loader puts this layer's tensors, under their names in ``transformers``."""
        attention = self.attention
        slots = {
            f"{prefix}.input_layernorm.weight": Slot.whole(self.attention_norm.weight.data),
            f"{prefix}.post_attention_layernorm.weight": Slot.whole(self.mlp_norm.weight.data),
        }
        slots.update(attention.qkv.slots([f"{prefix}.self_attn.{name}_proj" for name in "qkv"]))
        slots.update(attention.o.slots([f"{prefix}.self_attn.o_proj"]))
        slots.update(self.gate_up.slots([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]))
        slots.update(self.down.slots([f"{prefix}.mlp.down_proj"]))
        if attention.q_norm is not None and attention.k_norm is not None:
            slots[f"{prefix}.self_attn.q_norm.weight"] = Slot.whole(attention.q_norm.weight.data)
            slots[f"{prefix}.self_attn.k_norm.weight"] = Slot.whole(attention.k_norm.weight.data)
        return slots


class CausalLM(nn.Module):
    """A decoder-only language model, or one rank's part of it.

    Its weights are uninitialized until a loader has filled :meth:`slots`.

    Args:
        config: of the whole model.
        dtype, device: of the weights.
        ranks: the others that share the model.

    Attributes:
        config: of what is held here: :attr:`Partition.config`.
        embedding: [rows of the vocabulary held here, hidden_size].
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, ranks: Communicator | None = None
    ) -> None:
        super().__init__()
        self.ranks: Communicator = ranks or OneRank()
        self.part = Partition.of(config, self.ranks.rank, self.ranks.size)
        self.config = self.part.config
        self.rotary = make_rotary_embedding(config, device)
        self.layers = nn.ModuleList(
            DecoderLayer(self.part, self.ranks, window, dtype, device) for window in config.sliding_windows
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = Linear(Span.whole(config.hidden_size), self.part.vocab, dtype=dtype, device=device)
        self.embedding = (
            self.head.weight
            if config.tie_word_embeddings
            else weight(len(self.part.vocab), config.hidden_size, dtype=dtype, device=device)
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKV],
        attention: AttentionBackend[M],
        metadata: M,
        sampled: Tensor,
        wants_logits: bool = True,  # noqa: ARG002 - who does not want them wants the best, which is not known here
    ) -> ModelOutput:
        """Computes one step of a ragged batch.

        Args:
            token_ids: [T] int64, the rows of all chunks end to end.
            positions: [T] int64, each row's position in its sequence.
            kv_caches: one for each layer, changed in place.
            attention: the backend.
            metadata: what the backend prepared for this step.
            sampled: [S] int64, the rows whose next token is scored.
            wants_logits: whether ``best`` alone, where it is known, is not enough.

        Returns:
            The residual stream, the same on every rank, and the logits, as :meth:`logits` gives them.
        """
        cos, sin = self.rotary(positions)
        x = self._embed(token_ids)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            x = layer(x, cos, sin, kv, attention, metadata)
        return ModelOutput(x, self.logits(x[sampled]))

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, hidden]: each token's row comes from the rank that holds it."""
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.embedding)
        vocab = self.part.vocab
        elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        rows = F.embedding((token_ids - vocab.start).masked_fill(elsewhere, 0), self.embedding)
        return self.ranks.all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: residual stream [S, hidden_size] to [S, vocab_size] float32.

        On ranks other than 0 they are of no use.
        """
        scores: Tensor = self.head(self.norm(hidden))
        if self.ranks.size == 1 or not len(hidden):
            return scores.float()
        size, total = self.ranks.size, self.part.vocab.total
        # Ranks exchange tensors of one shape: where the vocabulary does not divide evenly, some are filled up.
        pieces = self.ranks.gather(F.pad(scores, (0, -(-total // size) - scores.shape[1])))
        held = [piece[:, : len(Span.even(total, rank, size))] for rank, piece in enumerate(pieces)]
        return torch.cat(held, dim=1).float() if held else scores.float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held here, a tied head counted once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def slots(self) -> dict[str, Slot]:
        """Where a loader puts each tensor, under its name in ``transformers``.

        Fused weights appear as views of their parts; a tied head as the embedding, under both names.
        """
        rows = (self.part.vocab, Span.whole(self.config.hidden_size))
        slots = {
            "model.embed_tokens.weight": Slot(self.embedding.data, rows),
            "model.norm.weight": Slot.whole(self.norm.weight.data),
            "lm_head.weight": Slot(self.head.weight.data, rows),
        }
        for index, layer in enumerate(self.layers):
            slots.update(cast("DecoderLayer", layer).slots(f"model.layers.{index}"))
        return slots
