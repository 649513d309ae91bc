"""Products of a few query rows with pieces of the cache, which tiles take as they lie there.

A piece is sixteen tokens. Their keys are rows of one operand, and the query's rows are the columns of the other, so
scores come out with a row for each token. Values of as many tokens as make a word of four bytes lie in turns, which is
how the second operand of a product wants them; the first are rows of the softmax's weights.

Of bfloat16, a word is two numbers. What int8 meets has sixteen bits, in two int8 numbers, high and low, and so twice
as many rows: eight bits would cost as much accuracy as the cache does. Queries are signed, weights unsigned.

All products need no more than one configuration of the tiles, which takes as long to set up as a piece does to compute.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from chairlift.model.kernels.attention_items import PADDED
from chairlift.model.kernels.memory import CACHE_LINE, WORD_BYTES, ask_for, bytes_of, operation
from chairlift.model.kernels.simd import LANES
from chairlift.model.kernels.tiles import CONFIG_BYTES, TILE_BYTES, TILE_ROWS, emit

PIECE = LANES
"""Tokens of a piece."""
VALUE_COLUMNS = 2 * LANES
"""Numbers of a head whose weighted values are added up at a time."""
# What the tiles hold. The last two are sums of values.
_SCORES, _QUERY, _KEYS, _WEIGHTS, _VALUES, _SUMS = 0, 1, 2, 3, 4, (5, 6)

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def configurations(rows: int, itemsize: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """For four query rows, for eight and so on up to ``rows``: [rows / 4, 64], over a cache of so many bytes a number.

    Flat, one behind the other.
    """
    made = np.zeros((rows // PADDED, CONFIG_BYTES), np.uint8)
    for i, config in enumerate(made):
        operand_rows = PADDED * (i + 1) * (2 if itemsize == 1 else 1)
        shapes = {
            _SCORES: (PIECE, operand_rows * WORD_BYTES),
            _QUERY: (TILE_ROWS, operand_rows * WORD_BYTES),
            _KEYS: (PIECE, TILE_BYTES),
            _WEIGHTS: (operand_rows, PIECE * itemsize),
            _VALUES: (PIECE * itemsize // WORD_BYTES, TILE_BYTES),
            **dict.fromkeys(_SUMS, (operand_rows, TILE_BYTES)),
        }
        config[0] = 1  # the only palette there is
        for tile, (tile_rows, width) in shapes.items():
            config[16 + 2 * tile], config[48 + tile] = width, tile_rows
    return made.reshape(-1)


def _pointer(builder: Any, address: Any, *offsets: Any) -> Any:
    for offset in offsets:
        address = builder.add(address, offset)
    return builder.inttoptr(address, _I8.as_pointer())


@operation
def address(typing_context: Any, memory: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """The address of ``memory[index]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(bytes_of(context, builder, memory, *arguments), _I64)

    return types.int64(memory, types.intp), generate


def _ask(lines: int, level: int) -> Any:
    @operation
    def ask(typing_context: Any, place: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for line in range(lines):
                ask_for(builder, _pointer(builder, arguments[0], _I64(line * CACHE_LINE)), level)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return ask


ask_for_lines = _ask(LANES, 3)
"""Asks for sixteen lines from an address on."""
ask_for_page = _ask(1, 2)
"""Asks for a line, so that the processor has found where its page lies when others of it are asked for."""


@operation
def clear_scores(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Scores of a piece are zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit(builder, "tilezero", _I8(_SCORES))
        return context.get_dummy_value()

    return types.void(), generate


@operation
def clear_sums(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Sums of values are zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for tile in _SUMS:
            emit(builder, "tilezero", _I8(tile))
        return context.get_dummy_value()

    return types.void(), generate


@operation
def store_scores(typing_context: Any, memory: Any, index: Any, rows: Any) -> tuple[Any, Callable[..., Any]]:
    """Writes the scores of a piece, [16, rows], from ``memory[index]`` on: float32, or int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = bytes_of(context, builder, memory, *arguments[:2])
        emit(builder, "tilestored64", _I8(_SCORES), place, builder.mul(arguments[2], _I64(WORD_BYTES)))
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.intp), generate


@operation
def store_sums(typing_context: Any, memory: Any, index: Any, width: Any) -> tuple[Any, Callable[..., Any]]:
    """Writes sums of values, 32 of each row, whose rows lie ``width`` numbers apart: float32, or int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stride = builder.mul(arguments[2], _I64(WORD_BYTES))
        for i, tile in enumerate(_SUMS):
            index = builder.add(arguments[1], _I64(i * LANES))
            emit(builder, "tilestored64", _I8(tile), bytes_of(context, builder, memory, arguments[0], index), stride)
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.intp), generate


def _score(product: str) -> Any:
    @operation
    def score(
        typing_context: Any, query: Any, q: Any, rows: Any, keys: Any, pitch: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query_, q_, rows_, keys_, pitch_ = arguments
            place = bytes_of(context, builder, query, query_, q_)
            emit(builder, "tileloadd64", _I8(_QUERY), place, builder.mul(rows_, _I64(WORD_BYTES)))
            emit(builder, "tileloadd64", _I8(_KEYS), _pointer(builder, keys_), pitch_)
            emit(builder, product, _I8(_SCORES), _I8(_KEYS), _I8(_QUERY))
            return context.get_dummy_value()

        return types.void(query, types.intp, types.intp, types.int64, types.int64), generate

    return score


score_bfloat16, score_int8 = _score("tdpbf16ps"), _score("tdpbssd")
"""Adds to the scores of a piece the products of 64 bytes of each key, which begin at the address ``keys`` and lie
``pitch`` bytes apart, with the same numbers of the query: sixteen rows of words from ``query[q]`` on (int32), each with
one of all of the query's ``rows``."""


def _add(product: str) -> Any:
    @operation
    def add(
        typing_context: Any, weights: Any, w: Any, width: Any, values: Any, pitch: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights_, w_, width_, values_, pitch_ = arguments
            place = bytes_of(context, builder, weights, weights_, w_)
            emit(builder, "tileloadd64", _I8(_WEIGHTS), place, builder.mul(width_, _I64(WORD_BYTES)))
            for i, tile in enumerate(_SUMS):
                emit(builder, "tileloadd64", _I8(_VALUES), _pointer(builder, values_, _I64(i * TILE_BYTES)), pitch_)
                emit(builder, product, _I8(tile), _I8(_WEIGHTS), _I8(_VALUES))
            return context.get_dummy_value()

        return types.void(weights, types.intp, types.intp, types.int64, types.int64), generate

    return add


add_bfloat16, add_int8 = _add("tdpbf16ps"), _add("tdpbusd")
"""Adds to the sums the weighted values of a piece, of 32 numbers of a head: words of them, which begin at the address
``values`` with rows of as many tokens as make a word, ``pitch`` bytes apart, times rows of weights, which begin with
the word ``weights[w]`` (int32) and lie ``width`` words apart."""


@operation
def turn(typing_context: Any, source: Any, s: Any, pitch: Any, target: Any, t: Any, width: Any) -> Any:
    """Makes rows of columns: four words of each of sixteen rows become sixteen of four, ``pitch`` and ``width`` apart.

    ``source`` and ``target`` are of any numbers of four bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, s_, pitch_, target_, t_, width_ = arguments
        quarter = ir.VectorType(_I32, 4)

        def shuffled(a: Any, b: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))

        def words(row: int) -> Any:
            place = builder.add(s_, builder.mul(pitch_, _I64(row)))
            there = builder.bitcast(bytes_of(context, builder, source, source_, place), quarter.as_pointer())
            return builder.load(there, align=WORD_BYTES)

        # Rows i, i + 4, i + 8 and i + 12 side by side, so that all that follows stays within sixteen bytes.
        rows = []
        for i in range(4):
            halves = [shuffled(words(i + j), words(i + j + 4), list(range(8))) for j in (0, 8)]
            rows.append(shuffled(halves[0], halves[1], list(range(16))))
        quarters = range(0, 16, 4)
        low, high = (
            [q + lane + 16 * row for q in quarters for lane in lanes for row in (0, 1)] for lanes in ((0, 1), (2, 3))
        )
        first, second = (
            [q + i + 16 * row for q in quarters for row in (0, 1) for i in pair] for pair in ((0, 1), (2, 3))
        )
        for pair, order in enumerate((low, high)):
            a, b = shuffled(rows[0], rows[1], order), shuffled(rows[2], rows[3], order)
            for i, half in enumerate((first, second)):
                place = builder.add(t_, builder.mul(width_, _I64(2 * pair + i)))
                column = shuffled(a, b, half)
                there = builder.bitcast(bytes_of(context, builder, target, target_, place), column.type.as_pointer())
                builder.store(column, there, align=WORD_BYTES)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp), generate
