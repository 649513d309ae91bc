"""Which part of a model a rank holds where several share it (tensor parallel), and what ranks say to each other.

The scheme is Megatron's (arXiv:1909.08053): a rank holds some of the attention heads and some of the MLP's columns, and
what comes out of either is a part of a sum, added up over the ranks. The vocabulary is cut as well.

Sizes need not divide evenly. The step takes as long as its slowest rank, so an uneven cut costs its imbalance and
nothing else, while insisting on even ones would leave a model of 9 heads with 1, 3 or 9 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from chairlift.config import ConfigError
from chairlift.model.config import ModelConfig


class Communicator(Protocol):
    """What one rank says to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many ranks there are.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, all of one shape; ``x`` itself may be changed."""
        ...

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """On rank 0 every rank's ``x``, all of one shape, in order of ranks; elsewhere nothing."""
        ...


class OneRank:
    """The communicator of a model that one process holds whole."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :meth:`Communicator.all_reduce`."""
        return x

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See :meth:`Communicator.gather`."""
        return [x]


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank holds of one dimension of a weight: entries ``start`` to ``stop`` of ``total``."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def whole(cls, total: int) -> Span:
        """All of it."""
        return cls(0, total, total)

    @classmethod
    def even(cls, total: int, rank: int, size: int) -> Span:
        """The part of ``rank`` where the parts of ``size`` ranks differ by one at most."""
        return cls(total * rank // size, total * (rank + 1) // size, total)

    def times(self, width: int) -> Span:
        """The same part of a dimension in which each entry is ``width`` wide, such as the rows of a head."""
        return Span(self.start * width, self.stop * width, self.total * width)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a loader puts a tensor of a checkpoint, or the part of it that a rank holds.

    Attributes:
        tensor: to fill.
        spans: of the whole tensor, what goes there: one for each dimension.
    """

    tensor: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Slot:
        """For a tensor that every rank holds."""
        return cls(tensor, tuple(Span.whole(n) for n in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(span.total for span in self.spans)

    @property
    def index(self) -> tuple[slice, ...]:
        """Takes the part out of the whole."""
        return tuple(slice(span.start, span.stop) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Partition:
    """What one rank holds of a model.

    A rank's query heads share its key/value heads evenly, as those of the whole model do, so that layers, attention and
    KV cache of a rank are those of a smaller model. Where there are no more ranks than key/value heads, each takes some
    of these with all the query heads that share them. Where there are more, each takes one, which several then hold,
    and some of its query heads.

    Attributes:
        config: of the smaller model: the heads and the MLP's width are the rank's own, all else the whole model's.
        heads, kv_heads: query and key/value heads.
        inner: columns of the MLP.
        vocab: rows of embedding and head.
    """

    config: ModelConfig
    heads: Span
    kv_heads: Span
    inner: Span
    vocab: Span

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Partition:
        """The part of ``rank`` among ``size``, for which :func:`check_size` has no objection."""
        heads, kv_heads = _split_heads(config.num_heads, config.num_kv_heads, rank, size)
        inner = Span.even(config.intermediate_size, rank, size)
        own = replace(config, num_heads=len(heads), num_kv_heads=len(kv_heads), intermediate_size=len(inner))
        return cls(own, heads, kv_heads, inner, Span.even(config.vocab_size, rank, size))


def check_size(config: ModelConfig, size: int) -> None:
    """Raises ConfigError if a model cannot be shared by so many ranks."""
    for what, most in (
        ("query heads", config.num_heads),
        ("MLP columns", config.intermediate_size),
        ("tokens of vocabulary", config.vocab_size),
    ):
        if size > most:
            raise ConfigError(
                f"--tensor-parallel-size {size} is more than the model's {most} {what}, and each rank needs at least "
                f"one; use {most} or less"
            )


def _split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[Span, Span]:
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = Span.even(num_kv_heads, rank, size)
        return kv.times(group), kv
    head = rank * num_kv_heads // size
    first, last = (-(-k * size // num_kv_heads) for k in (head, head + 1))  # the ranks that hold it
    part = Span.even(group, rank - first, last - first)
    offset = head * group
    return Span(offset + part.start, offset + part.stop, num_heads), Span(head, head + 1, num_kv_heads)
