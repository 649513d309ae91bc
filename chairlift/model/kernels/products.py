"""Products of activations and packed weights, the bulk of a step.

Weights [N, K] are packed once. They are cut along N into strips of 16 columns, and along K into words of four bytes:
one float32, two bfloat16 or four int8. A strip holds its columns' words side by side, 64 bytes for each word of K::

    strip 0: word 0 of columns 0-15 | word 1 of columns 0-15 | ...      strip 1: word 0 of columns 16-31 | ...

So one word of an activation row, in all lanes of a vector, meets 16 columns at once; and 16 rows of 64 bytes are just
what a matrix tile takes. Weights are read once and in order, which is all that counts for few rows.

A product computes a block: up to 32 rows of activations by two strips, all of K.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chairlift.model.kernels import tiles
from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import WORD_BYTES, ask_for, bytes_of, data_of
from chairlift.model.kernels.simd import LANES

BLOCK_ROWS = 32
STRIPS = 2
BLOCK_COLUMNS = STRIPS * LANES

# The instructions below are given by name, which LLVM has to read.
binding.initialize_native_asmparser()

Words = npt.NDArray[np.int32]

_I32, _BYTE = ir.IntType(32), ir.IntType(8)
_F32X16, _I32X16 = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)


def pack(weights: npt.NDArray[Any]) -> Words:
    """Packs [N, K] of float32, int16 (the bits of bfloat16) or int8; N is filled up with zeros to whole blocks.

    Returns:
        [blocks × 2 strips × words of K × 16] int32, flat.
    """
    columns, width = weights.shape
    per_word = WORD_BYTES // weights.itemsize
    if width % per_word:
        raise ValueError(f"{width} numbers of {weights.itemsize} bytes do not fill whole words")
    padded = -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
    if padded != columns:
        weights = np.concatenate([weights, np.zeros((padded - columns, width), weights.dtype)])
    words = np.ascontiguousarray(weights).view(np.int32).reshape(padded // LANES, LANES, width // per_word)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(-1)


# ---- vectors ----


def _fma_float32(builder: Any, sums: Any, word: Any, weights: Any) -> Any:
    name = f"llvm.fmuladd.v{LANES}f32"
    kind = ir.FunctionType(_F32X16, [_F32X16] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [builder.bitcast(word, _F32X16), builder.bitcast(weights, _F32X16), sums])


def _instruction(name: str, sums_type: Any) -> Callable[..., Any]:
    """By its name, since what LLVM calls these instructions changes from version to version."""

    def emit(builder: Any, sums: Any, word: Any, weights: Any) -> Any:
        kind = ir.FunctionType(sums_type, [sums_type, _I32X16, _I32X16])
        return builder.asm(kind, f"{name} $3, $2, $0", "=v,0,v,v", [sums, word, weights], False)

    return emit


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    data = data_of(context, builder, array_type, array)
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def _vector_block(rows: int, strips: int, multiply_add: Callable[..., Any], sums_type: Any, ahead: int = 0) -> Any:
    """Rows of activations by a few strips, in registers. So many lines ahead, weights are asked for: those of each
    strip, and behind its end those of a strip of the block that begins at ``following``."""

    @intrinsic
    def block(
        typing_context: Any, a: Any, ai: Any, stride: Any, weights: Any, wi: Any, words: Any, strip: Any,
        following: Any, c: Any, ci: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a_, ai_, stride_, w_, wi_, words_, strip_, following_, c_, ci_ = arguments
            i64 = ci_.type
            cells = [(row, column) for row in range(rows) for column in range(strips)]
            places = [
                _address(
                    context, builder, c, c_, builder.add(ci_, i64((row * strips + column) * LANES)), sums_type
                )
                for row, column in cells
            ]  # fmt: skip
            sums = [cgutils.alloca_once(builder, sums_type) for _ in cells]
            for total in sums:
                builder.store(sums_type(None), total)
            zeros = ir.Constant(_I32X16, [0] * LANES)

            def multiply(first: Any, last: Any, asked: Any) -> None:
                """Goes over words; of ``asked``, as many words on, lines are asked for."""
                with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                    index = builder.add(first, loop.index)
                    offset = builder.mul(index, i64(LANES))
                    read = []
                    for column in range(strips):
                        place = builder.add(offset, builder.mul(strip_, i64(column)))
                        if ahead:
                            # For the second level: it is not read at once.
                            ask_for(builder, bytes_of(context, builder, weights, w_, builder.add(asked, place)), 2)
                        place = builder.add(wi_, place)
                        read.append(
                            builder.load(_address(context, builder, weights, w_, place, _I32X16), align=WORD_BYTES)
                        )
                    for row in range(rows):
                        place = builder.add(builder.add(ai_, index), builder.mul(stride_, i64(row)))
                        number = builder.load(_address(context, builder, a, a_, place, _I32))
                        lane = builder.insert_element(ir.Constant(_I32X16, ir.Undefined), number, _I32(0))
                        lanes = builder.shuffle_vector(lane, lane, zeros)
                        for column in range(strips):
                            total = sums[row * strips + column]
                            builder.store(multiply_add(builder, builder.load(total), lanes, read[column]), total)

            lines = i64(ahead)
            whole = builder.sub(words_, lines)
            whole = builder.select(builder.icmp_signed(">", whole, i64(0)), whole, i64(0))
            if ahead:
                multiply(i64(0), whole, builder.add(wi_, i64(ahead * LANES)))
                behind = builder.mul(builder.sub(lines, words_), i64(LANES))
                multiply(whole, words_, builder.add(following_, behind))
            else:
                multiply(i64(0), words_, wi_)
            for place, total in zip(places, sums, strict=True):
                builder.store(builder.load(total), place, align=WORD_BYTES)
            return context.get_dummy_value()

        numbers = (types.intp,) * 2
        return types.void(a, *numbers, weights, *numbers, *numbers, c, types.intp), generate

    return block


def _vector_product(multiply_add: Callable[..., Any], sums_type: Any) -> Any:
    eight, four, two, one = (_vector_block(rows, STRIPS, multiply_add, sums_type) for rows in (8, 4, 2, 1))

    @compiled
    def product(kind, a, ai, stride, rows, weights, wi, words, strip, c, ci):
        """Computes a block; see :func:`product_of`."""
        row = 0
        while row < rows:
            left = rows - row
            at, ct = ai + row * stride, ci + row * BLOCK_COLUMNS
            if left >= 8:
                eight(a, at, stride, weights, wi, words, strip, wi, c, ct)
                row += 8
            elif left >= 4:
                four(a, at, stride, weights, wi, words, strip, wi, c, ct)
                row += 4
            elif left >= 2:
                two(a, at, stride, weights, wi, words, strip, wi, c, ct)
                row += 2
            else:
                one(a, at, stride, weights, wi, words, strip, wi, c, ct)
                row += 1

    return product


# ---- one row ----

ROW_STRIPS = 8
"""A row meets as many strips side by side: hardware that reads ahead does so within pages of 4 KiB, and reads more of
eight pages at once than of two."""
ROW_AHEAD = 16
"""Lines of each strip that are asked for ahead."""


def _row_product(multiply_add: Callable[..., Any], sums_type: Any) -> Any:
    eight, four, two = (_vector_block(1, strips, multiply_add, sums_type, ROW_AHEAD) for strips in (ROW_STRIPS, 4, 2))

    @compiled
    def product(kind, a, weights, wi, words, strips, following, c):
        """Computes a piece; see :func:`row_product_of`."""
        strip = words * LANES
        if strips == ROW_STRIPS:
            eight(a, 0, 0, weights, wi, words, strip, following, c, 0)
        elif strips == 4:
            four(a, 0, 0, weights, wi, words, strip, following, c, 0)
        else:
            two(a, 0, 0, weights, wi, words, strip, following, c, 0)

    return product


# ---- tiles ----


def _tile_product(multiply: Any) -> Any:
    multiply_whole, multiply_half = multiply
    store_whole, store_half = tiles.store_block
    clear, step = tiles.clear_block, tiles.TILE_ROWS

    @compiled
    def product(kind, a, ai, stride, rows, weights, wi, words, strip, c, ci):
        """Computes a block, of 16 or 32 rows whatever ``rows`` is; see :func:`product_of`."""
        clear()
        if rows > step:
            for word in range(0, words, step):
                multiply_whole(a, ai + word, stride, weights, wi + word * LANES, LANES, strip)
            store_whole(c, ci, BLOCK_COLUMNS)
        else:
            for word in range(0, words, step):
                multiply_half(a, ai + word, stride, weights, wi + word * LANES, LANES, strip)
            store_half(c, ci, BLOCK_COLUMNS)

    return product


# ---- choice ----

PRECISIONS = ("float32", "bfloat16", "int8")
_VECTORS = {
    "float32": (_fma_float32, _F32X16),
    "bfloat16": (_instruction("vdpbf16ps", _F32X16), _F32X16),
    "int8": (_instruction("vpdpbusd", _I32X16), _I32X16),
}


def unsupported(precision: str) -> str | None:
    """Why this processor has no instructions for products of this precision, or ``None`` if it has."""
    features = binding.get_host_cpu_features()
    needed = {"float32": None, "bfloat16": "avx512bf16", "int8": "avx512vnni"}[precision]
    if needed is None or features.get(needed) or tiles.available():
        return None
    return f"the processor computes no {precision} products (it lacks {needed} and AMX)"


def uses_tiles(precision: str) -> bool:
    """Whether products of this precision run in matrix tiles here."""
    return precision != "float32" and tiles.available()


@cache
def product_of(precision: str, *, in_tiles: bool) -> Any:
    """The kernel ``product(kind, a, ai, stride, rows, weights, wi, words, strip, c, ci)``.

    It sets the first ``rows`` rows of a block of 32 by 32 numbers that begins at ``c[ci]``.
    ``a`` holds words: row r begins at ``a[ai + r * stride]``. ``words`` of each row meet as many of each of the two
    strips of weights, which begin at ``weights[wi]``, ``strip`` words apart. ``c`` is float32, for int8 int32;
    activations are unsigned then. In tiles, rows are computed by sixteens, so that memory for them has to be there,
    and ``words`` is a multiple of 16. ``kind`` is one of :mod:`~chairlift.model.kernels.kinds`: code from Numba's cache
    is found by name and types of arguments, so functions that differ may not be called with the same.
    """
    if in_tiles:
        return _tile_product({"bfloat16": tiles.multiply_bfloat16, "int8": tiles.multiply_int8}[precision])
    return _vector_product(*_VECTORS[precision])


@cache
def row_product_of(precision: str) -> Any:
    """The kernel ``product(kind, a, weights, wi, words, strips, following, c)``, in vectors, for a single row.

    It sets ``c`` to the products of the row, which begins at ``a[0]``, and 2, 4 or 8 strips, which begin at
    ``weights[wi]`` end to end; ``weights[following]`` is what is read next. Else it is as :func:`product_of`.
    """
    return _row_product(*_VECTORS[precision])
