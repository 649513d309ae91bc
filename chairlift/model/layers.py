"""The building blocks of a decoder. Each holds its weights and has one place that computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialized tensor for a loader to fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """``y = x Wᵀ + b``, for one projection or for several of the same input, fused along the output.

    Args:
        in_features: width of the input.
        out_features: width of each fused output.
        bias: whether there is a bias.
        dtype, device: of the weights.
    """

    def __init__(
        self, in_features: int, *out_features: int, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.out_features = list(out_features)
        self.weight = weight(sum(out_features), in_features, dtype=dtype, device=device)
        self.bias = weight(sum(out_features), dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum of out_features]."""
        return F.linear(x, self.weight, self.bias)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields where a loader puts each fused projection: its name with ``.weight`` or ``.bias``, and a view."""
        for name, part in zip(names, torch.split(self.weight.data, self.out_features), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, part in zip(names, torch.split(self.bias.data, self.out_features), strict=True):
                yield f"{name}.bias", part


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, in float32, then scales (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same. Rounds to the input's dtype before it scales, as the models were trained."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 × n] to [T, n]: SiLU of the first half times the second (SwiGLU, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
