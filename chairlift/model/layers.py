"""The building blocks of a decoder. Each holds its weights and has one place that computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from chairlift.model.parallel import Communicator, Slot, Span


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialized tensor for a loader to fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """``y = x Wᵀ + b``, for one projection or for several of the same input, fused along the output.

    Where ranks share a model, each computes its own part of the output (column parallel).

    Args:
        in_features: of the input, what is given.
        out_features: of each fused output, what is computed.
        bias: whether there is a bias.
        dtype, device: of the weights.
    """

    def __init__(
        self, in_features: Span, *out_features: Span, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        width = sum(map(len, out_features))
        self.weight = weight(width, len(in_features), dtype=dtype, device=device)
        self.bias = weight(width, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, sum of out_features]."""
        return F.linear(x, self.weight, self.bias)

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Yields where a loader puts each fused projection: its name with ``.weight`` or ``.bias``, and a view."""
        widths = [len(span) for span in self.out_features]
        for name, part, span in zip(names, torch.split(self.weight.data, widths), self.out_features, strict=True):
            yield f"{name}.weight", Slot(part, (span, self.in_features))
        if self.bias is not None:
            for name, part, span in zip(names, torch.split(self.bias.data, widths), self.out_features, strict=True):
                yield f"{name}.bias", Slot(part, (span,))


class RowLinear(Linear):
    """A projection of which each rank is given a part of the input; the products are added up (row parallel)."""

    def __init__(
        self,
        in_features: Span,
        out_features: Span,
        *,
        ranks: Communicator,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """[T, part of in_features] to [T, out_features], the same on every rank."""
        bias = self.bias if self.ranks.rank == 0 else None  # once is enough
        return self.ranks.all_reduce(F.linear(x, self.weight, bias))


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
