"""What a step does differently for each kind of product: Numba picks the variant by the type of ``kind``.

A stub says what an operation does, and is what kernels call. The function behind it returns the variant for a kind.
"""

# ruff: noqa: ARG001 -- the variants of an operation take the same arguments, whichever they need.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from chairlift.model.kernels import kinds, products, tiles
from chairlift.model.kernels.compiling import COMPILED_ONLY
from chairlift.model.kernels.kinds import in_tiles, is_quantized
from chairlift.model.kernels.memory import as_words
from chairlift.model.kernels.products import BLOCK_COLUMNS
from chairlift.model.kernels.rows import write_row
from chairlift.model.kernels.simd import LANES, fma, load, load_difference, splat, store


class Packed(NamedTuple):
    """One packed projection: where its first word and its first column lie in the memory of many.

    Kernels have pointers there; what is handed to them has arrays.
    """

    words: Any
    scales: Any
    offsets: Any
    first_word: int
    first_column: int


def begin(kind: Any, config: Any, kept: Any) -> None:  # pragma: no cover
    """Sets a thread's tiles up."""
    raise TypeError(COMPILED_ONLY)


@overload(begin)
def _begin(kind, config, kept):
    keep, configure = tiles.keep_configuration, tiles.configure

    def set_up(kind, config, kept):
        keep(kept)
        configure(config)

    def nothing(kind, config, kept):
        pass

    return set_up if in_tiles(kind) else nothing


def end(kind: Any, kept: Any) -> None:  # pragma: no cover
    """Puts a thread's tiles back."""
    raise TypeError(COMPILED_ONLY)


@overload(end)
def _end(kind, kept):
    configure = tiles.configure

    def put_back(kind, kept):
        configure(kept)

    def nothing(kind, kept):
        pass

    return put_back if in_tiles(kind) else nothing


def words_of(kind, made, activations):  # pragma: no cover
    """What a product takes: what a stage made, or for int8 what it was quantized to."""
    raise TypeError(COMPILED_ONLY)


@overload(words_of)
def _words_of(kind, made, activations):
    def as_made(kind, made, activations):
        return as_words(made)

    def as_quantized(kind, made, activations):
        return as_words(activations)

    return as_quantized if is_quantized(kind) else as_made


def quantize_rows(kind, made, width, activations, scales, first, last):  # pragma: no cover
    """Makes activations of a thread's rows of what a stage made, and says whether there was something to do."""
    raise TypeError(COMPILED_ONLY)


@overload(quantize_rows)
def _quantize_rows(kind, made, width, activations, scales, first, last):
    def nothing(kind, made, width, activations, scales, first, last):
        return False

    def quantize(kind, made, width, activations, scales, first, last):
        for row in range(first, last):
            write_row(kind, made, row * width, width, activations, row * width, scales, row)
        return True

    return quantize if is_quantized(kind) else nothing


def block_product(kind, a, packed, scales, unit, row, count, width, numbers):  # pragma: no cover
    """Sets ``numbers`` [32, 32] float32 to the product of a unit (a pair of strips) and ``count`` rows, 32 at most."""
    raise TypeError(COMPILED_ONLY)


@overload(block_product)
def _block_product(kind, a, packed, scales, unit, row, count, width, numbers):
    product = products.product_of(kinds.PRECISIONS[kind.instance_class], in_tiles=in_tiles(kind))

    def plain(kind, a, packed, scales, unit, row, count, width, numbers):
        words = width // kind.per_word
        first = packed.first_word + unit * BLOCK_COLUMNS * words
        product(kind, a, row * words, words, count, packed.words, first, words, words * LANES, numbers, 0)

    def scaled(kind, a, packed, scales, unit, row, count, width, numbers):
        words = width // kind.per_word
        first = packed.first_word + unit * BLOCK_COLUMNS * words
        integers = as_words(numbers)
        product(kind, a, row * words, words, count, packed.words, first, words, words * LANES, integers, 0)
        column = packed.first_column + unit * BLOCK_COLUMNS
        zero = splat(np.float32(0))
        for r in range(count):
            scale = splat(scales[row + r])
            for i in range(0, BLOCK_COLUMNS, LANES):
                sums = load_difference(integers, r * BLOCK_COLUMNS + i, packed.offsets, column + i)
                factor = fma(load(packed.scales, column + i), scale, zero)
                store(numbers, r * BLOCK_COLUMNS + i, fma(sums, factor, zero))

    return scaled if is_quantized(kind) else plain


def row_product(kind, a, packed, scales, strip, strips, following, width, numbers):  # pragma: no cover
    """Sets ``numbers`` [strips, 16] float32 to the product of strips, 2, 4 or 8, and the only row.

    ``following`` is the strip that is read next.
    """
    raise TypeError(COMPILED_ONLY)


@overload(row_product)
def _row_product(kind, a, packed, scales, strip, strips, following, width, numbers):
    product = products.row_product_of(kinds.PRECISIONS[kind.instance_class])

    def plain(kind, a, packed, scales, strip, strips, following, width, numbers):
        words = width // kind.per_word
        first = packed.first_word + strip * words * LANES
        behind = packed.first_word + following * words * LANES
        product(kind, a, packed.words, first, words, strips, behind, numbers)

    def scaled(kind, a, packed, scales, strip, strips, following, width, numbers):
        words = width // kind.per_word
        first = packed.first_word + strip * words * LANES
        behind = packed.first_word + following * words * LANES
        integers = as_words(numbers)
        product(kind, a, packed.words, first, words, strips, behind, integers)
        scale, zero = splat(scales[0]), splat(np.float32(0))
        column = packed.first_column + strip * LANES
        for i in range(0, strips * LANES, LANES):
            sums = load_difference(integers, i, packed.offsets, column + i)
            store(numbers, i, fma(sums, fma(load(packed.scales, column + i), scale, zero), zero))

    return scaled if is_quantized(kind) else plain
