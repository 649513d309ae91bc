"""The shape of a model, read from a ``config.json`` or from GGUF metadata. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family, by configuration.

    Attributes:
        architecture: class name in ``transformers``, such as ``LlamaForCausalLM``.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: decoder layers.
        num_heads, num_kv_heads: query heads, and the key/value heads that they share (GQA).
        head_dim: width of one head; not always ``hidden_size / num_heads``.
        rms_norm_eps: epsilon of RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling parameters under the names of ``transformers`` (``rope_type`` among them), or ``None``.
        max_position_embeddings: longest sequence that the model was made for, scaling included.
        tie_word_embeddings: whether the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys before the rotation (Qwen3).
        sliding_windows: per layer, how many positions back a token sees, itself included; ``None`` for all.
        bos_token_id: beginning-of-sequence token, if the model has one.
        eos_token_ids: any of these ends a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
