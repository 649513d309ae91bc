"""Attention by dot products, for few query rows: keys and values go from the cache into registers and serve all rows.

Queries and the softmax's weights are bfloat16 where the cache is, and have sixteen bits where it is int8; sums are
float32.
"""

# ruff: noqa: ARG001 -- the variants of an operation take the same arguments, whichever they need.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from chairlift.model.kernels import dots
from chairlift.model.kernels.attention_items import FIRST, KV_HEAD, LAST, NUM_ROWS, POSITION
from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled
from chairlift.model.kernels.memory import as_words, for_threads, part, pointer
from chairlift.model.kernels.rows import TINY, int8_scale
from chairlift.model.kernels.simd import (
    LANES,
    exp2,
    fma,
    keep_between,
    largest,
    load,
    maximum,
    prefetch,
    splat,
    store,
    total,
)

FEW_ROWS = 8
"""Up to so many query rows of an item are attended with this way."""
SPAN = dots.INT8_SPAN
"""Tokens of an item that are taken at a time."""
PIECES = SPAN // LANES
AHEAD = dots.NEAR + dots.FAR
"""Addresses that are noted of what is read behind a span."""
UINT16_MAX = np.float32(65535)

_score_bfloat16_1, _score_bfloat16_2, _score_bfloat16_3, _score_bfloat16_4 = dots.score_bfloat16
_add_bfloat16_1, _add_bfloat16_2, _add_bfloat16_3, _add_bfloat16_4 = dots.add_bfloat16
_score_int8_1, _score_int8_2, _score_int8_3 = dots.score_int8
_add_int8_1, _add_int8_2, _add_int8_3 = dots.add_int8


class DotScratch(NamedTuple):
    """Working memory of all threads, or pointers to that of one.

    ``query``, ``output``, ``maxima`` and ``sums`` are as in
    :class:`~chairlift.model.kernels.attention_items.Scratch`. ``words`` holds the query as products take it, with each
    row's ``worth`` for int8; ``scores`` and ``weights`` are those of a span, with ``factors`` and ``steps`` of
    :mod:`~chairlift.model.kernels.dots`. ``places`` are addresses of pieces of the cache, keys and then values;
    ``ahead`` those of what is asked for meanwhile, which go on with what is read afterwards; ``scales`` says where in
    the pages their scales begin. ``tail`` is a last piece of values that is not full.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    words: Any
    worth: Any
    scores: Any
    weights: Any
    factors: Any
    steps: Any
    places: Any
    ahead: Any
    scales: Any
    tail: Any


def dot_scratch(threads: int, head_dim: int, cache_dtype: npt.DTypeLike) -> DotScratch:
    """Working memory for so many threads."""
    rows = max(dots.BFLOAT16_ROWS, dots.INT8_ROWS)
    return DotScratch(
        query=for_threads(threads, FEW_ROWS * head_dim, np.float32),
        output=for_threads(threads, FEW_ROWS * head_dim, np.float32),
        maxima=for_threads(threads, FEW_ROWS, np.float32),
        sums=for_threads(threads, FEW_ROWS * LANES, np.float32),
        # For int8, twice as many numbers and two words more a row.
        words=for_threads(threads, FEW_ROWS * (2 * head_dim + 8), cache_dtype),
        worth=for_threads(threads, FEW_ROWS, np.float32),
        scores=for_threads(threads, rows * SPAN, np.float32),
        weights=for_threads(threads, 2 * rows * SPAN, cache_dtype),
        factors=for_threads(threads, rows, np.float32),
        steps=for_threads(threads, rows, np.float32),
        places=for_threads(threads, 2 * PIECES, np.int64),
        ahead=for_threads(threads, 2 * PIECES + AHEAD, np.int64),
        scales=for_threads(threads, PIECES, np.int64),
        tail=for_threads(threads, LANES * head_dim, cache_dtype),
    )


@compiled
def own_dot_scratch(scratch: Any, thread: int, threads: int) -> Any:
    """A thread's working memory."""
    return DotScratch(
        part(scratch.query, thread, threads),
        part(scratch.output, thread, threads),
        part(scratch.maxima, thread, threads),
        part(scratch.sums, thread, threads),
        part(scratch.words, thread, threads),
        part(scratch.worth, thread, threads),
        part(scratch.scores, thread, threads),
        part(scratch.weights, thread, threads),
        part(scratch.factors, thread, threads),
        part(scratch.steps, thread, threads),
        part(scratch.places, thread, threads),
        part(scratch.ahead, thread, threads),
        part(scratch.scales, thread, threads),
        part(scratch.tail, thread, threads),
    )


# ---- where things lie ----


@compiled
def _span_end(item: Any, first: int) -> Any:
    return min(first + SPAN, item[LAST])


@compiled
def _lay_out(
    item: Any, first: int, pages: Any, table: Any, shape: Any, places: Any, values: int, ahead: Any, scales: Any
) -> int:
    """Notes the addresses of a span's pieces, of keys from ``places[0]`` and of values from ``places[values]`` on.

    What is asked for is a block from its beginning, whatever the rows of its keys are cut into. Returns their number.
    """
    shift, dim = shape.block_shift, shape.head_dim
    last, count = _span_end(item, first), 0
    for token in range(first, last, LANES):
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + item[KV_HEAD]
        offset = token & ((1 << shift) - 1)
        begin = (block * dim) << shift
        places[count] = dots.address(pages.keys, begin + offset)
        places[values + count] = dots.address(pages.values, begin + offset * dim)
        ahead[count] = dots.address(pages.keys, begin + offset * dim)
        ahead[values + count] = places[values + count]
        if pages.scaled:
            scales[count] = (block << shift) + offset
        count += 1
    return count


@compiled
def _look_ahead(item: Any, first: int, pages: Any, table: Any, shape: Any, ahead: Any) -> None:
    """Notes the addresses of the first pieces of keys that are read from ``first`` on."""
    shift, last = shape.block_shift, item[LAST] - 1
    for i in range(AHEAD):
        # There is always something to ask for, though it may have come already.
        token = min(first + i * LANES, last // LANES * LANES)
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + item[KV_HEAD]
        offset = ((block << shift) + (token & ((1 << shift) - 1))) * shape.head_dim
        ahead[i] = dots.address(pages.keys, offset)


@compiled
def _copy_tail(pages: Any, place: int, tokens: int, dim: int, tail: Any) -> None:
    """Copies the values of so many tokens, and fills up with zeros: what lies behind them may be anything."""
    for i in range(tokens * dim):
        tail[i] = pages.values[place + i]
    for i in range(tokens * dim, LANES * dim):
        tail[i] = 0


# ---- what depends on the cache's type ----


def _is_int8(pages: Any) -> bool:
    return bool(pages.types[0].dtype == types.int8)


def _most_rows(pages: Any) -> int:  # pragma: no cover
    raise TypeError(COMPILED_ONLY)


@overload(_most_rows)
def _most_rows_of(pages):  # type: ignore[no-untyped-def]
    most = dots.INT8_ROWS if _is_int8(pages) else dots.BFLOAT16_ROWS

    def rows(pages):  # type: ignore[no-untyped-def]
        return most

    return rows


def _start(pages: Any, num_rows: Any, dim: Any, scratch: Any) -> None:  # pragma: no cover
    """Makes words of the query's rows."""
    raise TypeError(COMPILED_ONLY)


@overload(_start)
def _start_by_type(pages, num_rows, dim, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, num_rows, dim, scratch):  # type: ignore[no-untyped-def]
        for i in range(0, num_rows * dim, LANES):
            store(scratch.words, i, load(scratch.query, i))

    def int8(pages, num_rows, dim, scratch):  # type: ignore[no-untyped-def]
        zero, one = splat(np.float32(0)), splat(np.float32(1))
        for row in range(num_rows):
            scale = int8_scale(scratch.query, row * dim, dim)
            scratch.worth[row] = scale / np.float32(256)
            factor = splat(np.float32(256) / scale)
            high, low = zero, zero
            place = row * (2 * dim + 8)
            for i in range(0, dim, LANES):
                lanes = fma(load(scratch.query, row * dim + i), factor, zero)
                dots.store_signed_halves(scratch.words, place + i, place + dim + i, lanes)
                high = fma(load(scratch.words, place + i), one, high)
                low = fma(load(scratch.words, place + dim + i), one, low)
            words = as_words(scratch.words)
            behind = (place + 2 * dim) // dots.GROUP
            words[behind] = np.int32(total(high)) * 128
            words[behind + 1] = np.int32(total(low)) * 128

    return int8 if _is_int8(pages) else bfloat16


def _score(pages: Any, row: Any, rows: Any, count: Any, shape: Any, scratch: Any) -> Any:  # pragma: no cover
    """Scores of so many rows, from ``row`` on, against the pieces."""
    raise TypeError(COMPILED_ONLY)


@overload(_score)
def _score_by_type(pages, row, rows, count, shape, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, row, rows, count, shape, scratch):  # type: ignore[no-untyped-def]
        words, places, scores, dim = as_words(scratch.words), scratch.places, scratch.scores, shape.head_dim
        ahead, q, pitch = pointer(scratch.ahead, dots.NEAR), row * dim // dots.PAIR, dots.PAIR << shape.block_shift
        if rows == 1:
            _score_bfloat16_1(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)
        elif rows == 2:
            _score_bfloat16_2(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)
        elif rows == 3:
            _score_bfloat16_3(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)
        else:
            _score_bfloat16_4(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)

    def int8(pages, row, rows, count, shape, scratch):  # type: ignore[no-untyped-def]
        words, places, scores, dim = as_words(scratch.words), scratch.places, scratch.scores, shape.head_dim
        ahead, q, pitch = pointer(scratch.ahead, dots.NEAR), row * (2 * dim // dots.GROUP + 2), 1 << shape.block_shift
        if rows == 1:
            _score_int8_1(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)
        elif rows == 2:
            _score_int8_2(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)
        else:
            _score_int8_3(words, q, dim, places, ahead, count, pitch, scores, 0, SPAN)

    return int8 if _is_int8(pages) else bfloat16


def _weigh(
    pages: Any, base: Any, s: Any, size: Any, low: Any, high: Any, r: Any, scratch: Any
) -> Any:  # pragma: no cover
    """Makes weights of a row's scores, as products take them; returns the sum of the weights in lanes."""
    raise TypeError(COMPILED_ONLY)


@overload(_weigh)
def _weigh_by_type(pages, base, s, size, low, high, r, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, base, s, size, low, high, r, scratch):  # type: ignore[no-untyped-def]
        running, one, minus = splat(np.float32(0)), splat(np.float32(1)), splat(-base)
        for i in range(0, size, LANES):
            weights = exp2(fma(load(scratch.scores, s + i), one, minus))
            running = fma(weights, one, running)
            store(scratch.weights, s + i, weights)
        return running

    def int8(pages, base, s, size, low, high, r, scratch):  # type: ignore[no-untyped-def]
        zero, one, minus = splat(np.float32(0)), splat(np.float32(1)), splat(-base)
        running, nothing, peak = zero, zero, splat(TINY)
        for i in range(0, size, LANES):
            weights = exp2(fma(load(scratch.scores, s + i), one, minus))
            running = fma(weights, one, running)
            weights = fma(weights, load(pages.value_scales, scratch.scales[i // LANES]), zero)
            if low > i or high < i + LANES:
                # There may be anything behind the last token.
                weights = dots.zero_outside(weights, low - i, high - i)
            peak = maximum(weights, peak)
            nothing = fma(weights, zero, nothing)
            store(scratch.scores, s + i, weights)
        most = largest(peak)
        # NaN if a value is.
        scratch.steps[r] = most / UINT16_MAX + total(nothing)
        factor = splat(UINT16_MAX / most)
        for i in range(0, size, LANES):
            lanes = fma(load(scratch.scores, s + i), factor, zero)
            dots.store_unsigned_halves(scratch.weights, 2 * s + i, 2 * s + SPAN + i, lanes)
        return running

    return int8 if _is_int8(pages) else bfloat16


def _add(
    pages: Any, row: Any, rows: Any, first: Any, count: Any, places: Any, ahead: Any, shape: Any, scratch: Any
) -> Any:  # pragma: no cover
    """Adds the weighted values of pieces to so many rows of the output, from ``row`` on."""
    raise TypeError(COMPILED_ONLY)


@overload(_add)
def _add_by_type(pages, row, rows, first, count, places, ahead, shape, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, row, rows, first, count, places, ahead, shape, scratch):  # type: ignore[no-untyped-def]
        weights, factors, steps, output = as_words(scratch.weights), scratch.factors, scratch.steps, scratch.output
        dim, span, w = shape.head_dim, SPAN // dots.PAIR, first * LANES // dots.PAIR
        o = row * dim
        if rows == 1:
            _add_bfloat16_1(weights, w, span, places, ahead, count, dim, factors, steps, output, o)
        elif rows == 2:
            _add_bfloat16_2(weights, w, span, places, ahead, count, dim, factors, steps, output, o)
        elif rows == 3:
            _add_bfloat16_3(weights, w, span, places, ahead, count, dim, factors, steps, output, o)
        else:
            _add_bfloat16_4(weights, w, span, places, ahead, count, dim, factors, steps, output, o)

    def int8(pages, row, rows, first, count, places, ahead, shape, scratch):  # type: ignore[no-untyped-def]
        weights, factors, steps, output = as_words(scratch.weights), scratch.factors, scratch.steps, scratch.output
        dim, span, w = shape.head_dim, SPAN // dots.GROUP, first * LANES // dots.GROUP
        o = row * dim
        if rows == 1:
            _add_int8_1(weights, w, span, places, ahead, count, dim, factors, steps, output, o)
        elif rows == 2:
            _add_int8_2(weights, w, span, places, ahead, count, dim, factors, steps, output, o)
        else:
            _add_int8_3(weights, w, span, places, ahead, count, dim, factors, steps, output, o)

    return int8 if _is_int8(pages) else bfloat16


# ---- an item ----


@compiled
def _soften(pages: Any, row: int, r: int, size: int, low: int, high: int, scratch: Any) -> None:
    """Turns the scores of a row, the ``r``-th of those taken together, into weights relative to its running maximum.

    Tokens outside [low, high) weigh nothing. Notes what the row's output is to be multiplied with.
    """
    scores, s, zero = scratch.scores, r * SPAN, splat(np.float32(0))
    old = scratch.maxima[row]
    peak = splat(old)
    for i in range(0, size, LANES):
        lanes = load(scores, s + i)
        if pages.scaled:
            factor = fma(load(pages.key_scales, scratch.scales[i // LANES]), splat(scratch.worth[row]), zero)
            lanes = fma(lanes, factor, zero)
        if low > i or high < i + LANES:
            lanes = keep_between(lanes, low - i, high - i)
        store(scores, s + i, lanes)
        peak = maximum(lanes, peak)
    new = largest(peak)
    scratch.maxima[row] = new
    # A row that has seen nothing yet has no maximum to subtract.
    base = np.float32(0) if new == -np.inf else new
    shrink = exp2(splat(old - base))
    store(scratch.sums, row * LANES, fma(load(scratch.sums, row * LANES), shrink, zero))
    running = _weigh(pages, base, s, size, low, high, r, scratch)
    store(scratch.sums, row * LANES, fma(running, splat(np.float32(1)), load(scratch.sums, row * LANES)))
    scratch.factors[r] = np.float32(1) if old == new else np.float32(2) ** (old - base)


@compiled
def attend_in_dots(item: Any, pages: Any, table: Any, following: Any, its_table: Any, shape: Any, scratch: Any) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch.

    Towards its end it asks for the first keys of the item that follows, which may be this one again.
    """
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    num_rows = item[NUM_ROWS] * group
    places, ahead = scratch.places, scratch.ahead
    _start(pages, num_rows, dim, scratch)
    window, most = shape.window, _most_rows(pages)
    for first in range(item[FIRST], item[LAST], SPAN):
        last = _span_end(item, first)
        count, whole = -(-(last - first) // LANES), (last - first) // LANES
        _lay_out(item, first, pages, table, shape, places, count, ahead, scratch.scales)
        if last < item[LAST]:
            _look_ahead(item, last, pages, table, shape, pointer(ahead, 2 * count))
        else:
            _look_ahead(following, following[FIRST], pages, its_table, shape, pointer(ahead, 2 * count))
        if pages.scaled:
            for i in range(count):
                prefetch(pages.key_scales, scratch.scales[i])
                prefetch(pages.value_scales, scratch.scales[i])
        row = 0
        while row < num_rows:
            left = num_rows - row
            rows = -(-left // -(-left // most))
            _score(pages, row, rows, count, shape, scratch)
            for r in range(rows):
                position = item[POSITION] + (row + r) // group
                low = position + 1 - window - first if window else 0
                _soften(pages, row + r, r, count * LANES, low, min(position + 1, last) - first, scratch)
            _add(pages, row, rows, 0, whole, pointer(places, count), pointer(ahead, count + dots.NEAR), shape, scratch)
            if whole < count:
                if row == 0:
                    at = (places[2 * count - 1] - dots.address(pages.values, 0)) // pages.itemsize
                    _copy_tail(pages, at, (last - first) - whole * LANES, dim, scratch.tail)
                    places[2 * count - 1] = dots.address(scratch.tail, 0)
                for r in range(rows):
                    scratch.factors[r] = 1
                _add(
                    pages,
                    row,
                    rows,
                    whole,
                    1,
                    pointer(places, count + whole),
                    pointer(ahead, count + whole + dots.NEAR),
                    shape,
                    scratch,
                )
            row += rows
