"""In which precision products are computed, and by which instructions: types that kernels are specialised by.

Numba compiles a kernel anew for each type of its arguments and keys its cache by them. So the choice travels as a
value whose type says it all.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Float32(NamedTuple):
    """float32 in vectors."""

    per_word: int = 1


class BFloat16(NamedTuple):
    """bfloat16 in vectors; sums are float32."""

    per_word: int = 2


class BFloat16Tiles(NamedTuple):
    """bfloat16 in matrix tiles; sums are float32."""

    per_word: int = 2


class Int8(NamedTuple):
    """int8 in vectors; sums are int32."""

    per_word: int = 4


class Int8Tiles(NamedTuple):
    """int8 in matrix tiles; sums are int32."""

    per_word: int = 4


Kind = Float32 | BFloat16 | BFloat16Tiles | Int8 | Int8Tiles
PRECISIONS = {Float32: "float32", BFloat16: "bfloat16", BFloat16Tiles: "bfloat16", Int8: "int8", Int8Tiles: "int8"}


def is_quantized(kind: Any) -> bool:
    """Whether a Numba type of these is int8."""
    return kind.instance_class in (Int8, Int8Tiles)


def in_tiles(kind: Any) -> bool:
    """Whether a Numba type of these computes in tiles."""
    return kind.instance_class in (BFloat16Tiles, Int8Tiles)
