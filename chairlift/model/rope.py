"""Rotary position embedding (RoPE, arXiv:2104.09864), with the scalings that stretch it to longer contexts.

The angles of a step are computed once from its positions and shared by all layers. Every angle is a function of the
token's own position alone. Batch mates, chunks of the prompt and preemption then cannot change what a token's key is,
and angles may be kept in a table, which goes no further than sequences do. For two scalings that is a choice: see
:class:`DynamicRotaryEmbedding` and :class:`LongRotaryEmbedding`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from chairlift.model.config import ModelConfig, yarn_attention_factor


class RotaryEmbedding:
    """Cosines and sines for the positions of a step.

    Args:
        inv_freq: [head_dim / 2] float32, radians per position.
        attention_factor: multiplies cosines and sines, and so the scores by its square.
    """

    def __init__(self, inv_freq: Tensor, attention_factor: float = 1.0) -> None:
        self.inv_freq = inv_freq
        self.attention_factor = attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, each [T, head_dim / 2] float32, for ``positions`` [T] int64."""
        angles = positions[:, None].float() * self.frequencies(positions)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def frequencies(self, positions: Tensor) -> Tensor:  # noqa: ARG002 - the same everywhere, unless a scaling says so
        """Returns radians per position, [head_dim / 2] or [T, head_dim / 2] float32."""
        return self.inv_freq


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK scaling: the base grows with the sequence once it is longer than the model was trained for.

    "The sequence" ends at the token itself here: position p is rotated as in a sequence of p + 1 tokens. That is what
    ``transformers`` does for each generated token, so its output is the same wherever the prompt is no longer than
    ``original_max_position_embeddings``. In a longer prompt it rotates all tokens by the prompt's full length instead,
    which cannot be done when prompts come in chunks and sequences are computed again after preemption.
    """

    def __init__(self, head_dim: int, theta: float, factor: float, original_length: int, device: torch.device) -> None:
        super().__init__(_default_frequencies(head_dim, theta, device))
        self.theta = theta
        self.factor = factor
        self.original_length = original_length
        self.head_dim = head_dim
        self.exponents = _exponents(head_dim, device)

    def frequencies(self, positions: Tensor) -> Tensor:
        """See :meth:`RotaryEmbedding.frequencies`."""
        length = (positions + 1).clamp(min=self.original_length)
        stretch = self.factor * length / self.original_length - (self.factor - 1)
        base = self.theta * stretch ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / base[:, None] ** self.exponents


class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE (arXiv:2402.13753): one set of factors within the original length, another beyond it.

    Chosen by the token's own position, as ``transformers`` does for each generated token. It chooses by the prompt's
    full length in the prompt, so outputs agree wherever the prompt is no longer than the original length.
    """

    def __init__(
        self, short_inv_freq: Tensor, long_inv_freq: Tensor, original_length: int, attention_factor: float
    ) -> None:
        super().__init__(short_inv_freq, attention_factor)
        self.long_inv_freq = long_inv_freq
        self.original_length = original_length

    def frequencies(self, positions: Tensor) -> Tensor:
        """See :meth:`RotaryEmbedding.frequencies`."""
        return torch.where(positions[:, None] < self.original_length, self.inv_freq, self.long_inv_freq)


def make_rotary_embedding(config: ModelConfig, device: torch.device) -> RotaryEmbedding:
    """Returns the rotation that a model was made with."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {"rope_type": "default"}
    inv_freq = _default_frequencies(dim, theta, device)
    match scaling["rope_type"]:
        case "default":
            return RotaryEmbedding(inv_freq)
        case "linear":
            return RotaryEmbedding(inv_freq / scaling["factor"])
        case "freq_factors":
            return RotaryEmbedding(inv_freq / torch.tensor(scaling["freq_factors"], device=device))
        case "llama3":
            return RotaryEmbedding(_llama3_frequencies(inv_freq, scaling))
        case "yarn":
            return RotaryEmbedding(_yarn_frequencies(dim, theta, scaling, device), _yarn_scale(scaling))
        case "dynamic":
            original = scaling["original_max_position_embeddings"]
            return DynamicRotaryEmbedding(dim, theta, scaling["factor"], original, device)
        case "longrope":
            return _longrope(dim, theta, scaling, device)
        case other:
            raise ValueError(f"unknown rope type {other!r}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of each head, in float32.

    Args:
        x: [T, heads, head_dim].
        cos: [T, head_dim / 2] float32.
        sin: as ``cos``.

    Returns:
        As ``x``, contiguous.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _exponents(dim: int, device: torch.device) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _default_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    periods: Tensor = theta ** _exponents(dim, device)
    return 1.0 / periods


def _llama3_frequencies(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    low, high, length = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    turns = length * inv_freq / (2 * math.pi)  # over the original context
    kept: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = inv_freq / scaling["factor"]
    return (1 - kept) * stretched + kept * inv_freq


def _yarn_frequencies(dim: int, theta: float, scaling: dict[str, Any], device: torch.device) -> Tensor:
    """YaRN (arXiv:2309.00071): fast dimensions keep their frequency, slow ones are interpolated, a ramp between."""

    def dimension_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_that_turns(scaling.get("beta_fast") or 32)
    high = dimension_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / span).clamp(0, 1)
    inv_freq = _default_frequencies(dim, theta, device)
    stretched: Tensor = inv_freq / scaling["factor"]
    return stretched * interpolated + inv_freq * (1 - interpolated)


def _yarn_scale(scaling: dict[str, Any]) -> float:
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    return yarn_attention_factor(factor)


def _longrope(dim: int, theta: float, scaling: dict[str, Any], device: torch.device) -> LongRotaryEmbedding:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    if (attention_factor := scaling.get("attention_factor")) is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    base = theta ** _exponents(dim, device)
    short, long = (torch.tensor(scaling[key], device=device) for key in ("short_factor", "long_factor"))
    return LongRotaryEmbedding(1.0 / (short * base), 1.0 / (long * base), original, attention_factor)
