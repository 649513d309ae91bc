"""Attention in matrix tiles for few query rows, which are too few to copy keys and values for.

The tokens pass by in spans: all scores of a span, the softmax's weights of all, and then what they weigh. While a piece
of the cache is read, another that is read soon is asked for, line by line: requests in bulk would fill the few buffers
that there are for lines on their way, and everything would wait for them.
"""

# ruff: noqa: ARG001 -- the variants of an operation take the same arguments, whichever they need.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from chairlift.model.kernels import cache_tiles, tiles
from chairlift.model.kernels.attention_items import (
    FIRST,
    KV_HEAD,
    LAST,
    NUM_ROWS,
    PADDED,
    POSITION,
    head_of_block,
    place_of,
    scales_of,
)
from chairlift.model.kernels.cache_tiles import PIECE, VALUE_COLUMNS
from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled
from chairlift.model.kernels.memory import WORD_BYTES, as_words, for_threads, pointer
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
    store_signed_halves,
    store_unsigned_halves,
    total,
    zero_outside,
)

FEW_ROWS = 8
"""Up to so many query rows of an item are attended with this way."""
SPAN = 256
"""Tokens of an item that are taken at a time. Their weighted int8 values add up to no more than 32 bits."""
PIECES = SPAN // PIECE
NEAR, FAR = 4, 8
"""How many pieces ahead the cache is asked for, and how many ahead the processor finds where a piece's page lies."""
UINT16_MAX = np.float32(65535)


class FewRowScratch(NamedTuple):
    """Working memory of all threads, or pointers to that of one.

    ``query``, ``output``, ``maxima`` and ``sums`` are as in
    :class:`~chairlift.model.kernels.attention_items.Scratch`. ``rounded`` is the query in the cache's type, and
    ``words`` what tiles take of it, with each row's ``worth`` for int8. ``raw`` are a span's scores as tiles make them,
    ``scores`` the same in rows, and ``weights`` those of the softmax; ``factors`` is what a row's output is multiplied
    with before the weighted values are added, and ``steps`` what an int8 weight is worth. ``added`` is what is added.
    ``places`` are addresses of pieces: the span's keys, its values, and the first keys of what is read then.
    ``scales`` says where in the pages their scales begin. ``tail`` is a last piece of bfloat16 values that is not full.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    rounded: Any
    words: Any
    worth: Any
    raw: Any
    scores: Any
    weights: Any
    factors: Any
    steps: Any
    added: Any
    places: Any
    scales: Any
    tail: Any


def few_row_scratch(threads: int, head_dim: int, cache_dtype: npt.DTypeLike) -> FewRowScratch:
    """Working memory for so many threads."""
    itemsize = np.dtype(cache_dtype).itemsize
    rows = FEW_ROWS * (2 if itemsize == 1 else 1)
    chunks = -(-head_dim * itemsize // tiles.TILE_BYTES)
    return FewRowScratch(
        query=for_threads(threads, FEW_ROWS * head_dim, np.float32),
        output=for_threads(threads, FEW_ROWS * head_dim, np.float32),
        maxima=for_threads(threads, FEW_ROWS, np.float32),
        sums=for_threads(threads, FEW_ROWS * LANES, np.float32),
        rounded=for_threads(threads, rows * head_dim, cache_dtype),
        words=for_threads(threads, chunks * tiles.TILE_ROWS * rows, np.int32),
        worth=for_threads(threads, FEW_ROWS, np.float32),
        raw=for_threads(threads, rows * SPAN, np.float32),
        scores=for_threads(threads, rows * SPAN, np.float32),
        weights=for_threads(threads, rows * SPAN, cache_dtype),
        factors=for_threads(threads, FEW_ROWS, np.float32),
        steps=for_threads(threads, FEW_ROWS, np.float32),
        added=for_threads(threads, rows * head_dim, np.float32),
        places=for_threads(threads, 2 * PIECES + FAR, np.int64),
        scales=for_threads(threads, PIECES, np.int64),
        tail=for_threads(threads, PIECE * head_dim, cache_dtype),
    )


# ---- where things lie ----


@compiled
def _address(pages: Any, table: Any, token: int, head: int, shape: Any) -> Any:
    """Of the keys of a piece that begins with a token; its values lie as far behind as a block has keys."""
    return cache_tiles.address(pages.keys, place_of(pages, table, token, head, shape))


@compiled
def _lay_out(item: Any, first: int, count: int, pages: Any, table: Any, shape: Any, places: Any, scales: Any) -> None:
    """Notes where so many pieces lie: their keys, their values, and their scales."""
    behind = (shape.head_dim << shape.block_shift) * pages.itemsize
    for i in range(count):
        token = first + i * PIECE
        place = _address(pages, table, token, item[KV_HEAD], shape)
        places[i], places[count + i] = place, place + behind
        if pages.scaled:
            block = scales_of(head_of_block(table, token, item[KV_HEAD], shape), pages)
            scales[i] = block + (token & ((1 << shape.block_shift) - 1))


@compiled
def _look_ahead(item: Any, first: int, pages: Any, table: Any, shape: Any, places: Any) -> None:
    """Notes where the first pieces of keys lie that are read from ``first`` on."""
    last = item[LAST] - 1
    for i in range(FAR):
        # There is always something to ask for, though it may have come already.
        token = min(first + i * PIECE, last // PIECE * PIECE)
        places[i] = _address(pages, table, token, item[KV_HEAD], shape)


@compiled
def _copy_tail(values: Any, first: int, tokens: int, dim: int, tail: Any) -> None:
    """Copies so many tokens' bfloat16 values from word ``first`` on, and fills up with zeros: what lies behind them may
    be anything, which no weight of zero makes zero."""
    source, target = pointer(as_words(values), first), as_words(tail)
    for i in range(tokens // 2 * dim):
        target[i] = source[i]
    for i in range(tokens // 2 * dim, -(-tokens // 2) * dim):
        target[i] = source[i] & 0xFFFF
    for i in range(-(-tokens // 2) * dim, PIECE // 2 * dim):
        target[i] = 0


# ---- what depends on the cache's type ----


def _is_int8(pages: Any) -> bool:
    return bool(pages.types[0].dtype == types.int8)


def _operand_rows(pages: Any, rows: Any) -> Any:  # pragma: no cover
    """Rows that an operand has for so many of the query."""
    raise TypeError(COMPILED_ONLY)


@overload(_operand_rows)
def _operand_rows_by_type(pages, rows):  # type: ignore[no-untyped-def]
    def bfloat16(pages, rows):  # type: ignore[no-untyped-def]
        return rows

    def int8(pages, rows):  # type: ignore[no-untyped-def]
        return 2 * rows

    return int8 if _is_int8(pages) else bfloat16


def _round(pages: Any, num_rows: Any, rows: Any, dim: Any, scratch: Any) -> None:  # pragma: no cover
    """Makes rows of an operand of the query's."""
    raise TypeError(COMPILED_ONLY)


@overload(_round)
def _round_by_type(pages, num_rows, rows, dim, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, num_rows, rows, dim, scratch):  # type: ignore[no-untyped-def]
        for i in range(0, num_rows * dim, LANES):
            store(scratch.rounded, i, load(scratch.query, i))

    def int8(pages, num_rows, rows, dim, scratch):  # type: ignore[no-untyped-def]
        zero = splat(np.float32(0))
        for row in range(num_rows):
            scale = int8_scale(scratch.query, row * dim, dim)
            scratch.worth[row] = scale / np.float32(256)
            factor = splat(np.float32(256) / scale)
            for i in range(row * dim, (row + 1) * dim, LANES):
                lanes = fma(load(scratch.query, i), factor, zero)
                store_signed_halves(scratch.rounded, i, rows * dim + i, lanes)

    return int8 if _is_int8(pages) else bfloat16


def _score(pages: Any, words: Any, q: Any, rows: Any, keys: Any, pitch: Any) -> None:  # pragma: no cover
    """Adds to the scores of a piece."""
    raise TypeError(COMPILED_ONLY)


@overload(_score)
def _score_by_type(pages, words, q, rows, keys, pitch):  # type: ignore[no-untyped-def]
    product = cache_tiles.score_int8 if _is_int8(pages) else cache_tiles.score_bfloat16

    def score(pages, words, q, rows, keys, pitch):  # type: ignore[no-untyped-def]
        product(words, q, rows, keys, pitch)

    return score


def _scores_of(pages: Any, scratch: Any, place: Any, row: Any, below: Any) -> Any:  # pragma: no cover
    """Sixteen scores of a row, of which ``below`` is what its low bytes led to."""
    raise TypeError(COMPILED_ONLY)


@overload(_scores_of)
def _scores_by_type(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
    def bfloat16(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
        return load(scratch.scores, place)

    def int8(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
        sums, zero = as_words(scratch.scores), splat(np.float32(0))
        both = fma(load(sums, place), splat(np.float32(256)), load(sums, below))
        worth = fma(load(pages.key_scales, scratch.scales[place % SPAN // PIECE]), splat(scratch.worth[row]), zero)
        return fma(both, worth, zero)

    return int8 if _is_int8(pages) else bfloat16


def _weigh(
    pages: Any, base: Any, row: Any, size: Any, low: Any, high: Any, rows: Any, scratch: Any
) -> Any:  # pragma: no cover
    """Makes weights of a row's scores, as products take them; returns the sum of the weights in lanes."""
    raise TypeError(COMPILED_ONLY)


@overload(_weigh)
def _weigh_by_type(pages, base, row, size, low, high, rows, scratch):  # type: ignore[no-untyped-def]
    def bfloat16(pages, base, row, size, low, high, rows, scratch):  # type: ignore[no-untyped-def]
        running, one, minus = splat(np.float32(0)), splat(np.float32(1)), splat(-base)
        for i in range(row * SPAN, row * SPAN + size, LANES):
            weights = exp2(fma(load(scratch.scores, i), one, minus))
            running = fma(weights, one, running)
            store(scratch.weights, i, weights)
        return running

    def int8(pages, base, row, size, low, high, rows, scratch):  # type: ignore[no-untyped-def]
        zero, one, minus = splat(np.float32(0)), splat(np.float32(1)), splat(-base)
        running, nothing, peak, s = zero, zero, splat(TINY), row * SPAN
        for i in range(0, size, LANES):
            weights = exp2(fma(load(scratch.scores, s + i), one, minus))
            running = fma(weights, one, running)
            weights = fma(weights, load(pages.value_scales, scratch.scales[i // PIECE]), zero)
            if low > i or high < i + LANES:
                # There may be anything behind the last token.
                weights = zero_outside(weights, low - i, high - i)
            peak = maximum(weights, peak)
            nothing = fma(weights, zero, nothing)
            store(scratch.scores, s + i, weights)
        most = largest(peak)
        # NaN if a value is.
        scratch.steps[row] = most / UINT16_MAX + total(nothing)
        factor = splat(UINT16_MAX / most)
        for i in range(s, s + size, LANES):
            lanes = fma(load(scratch.scores, i), factor, zero)
            store_unsigned_halves(scratch.weights, i, rows * SPAN + i, lanes)
        return running

    return int8 if _is_int8(pages) else bfloat16


def _add(pages: Any, weights: Any, w: Any, width: Any, values: Any, pitch: Any) -> None:  # pragma: no cover
    """Adds to the sums of values."""
    raise TypeError(COMPILED_ONLY)


@overload(_add)
def _add_by_type(pages, weights, w, width, values, pitch):  # type: ignore[no-untyped-def]
    product = cache_tiles.add_int8 if _is_int8(pages) else cache_tiles.add_bfloat16

    def add(pages, weights, w, width, values, pitch):  # type: ignore[no-untyped-def]
        product(weights, w, width, values, pitch)

    return add


def _added(pages: Any, scratch: Any, place: Any, row: Any, below: Any) -> Any:  # pragma: no cover
    """Sixteen weighted sums of values of a row, of which ``below`` is what the weights' low bytes led to."""
    raise TypeError(COMPILED_ONLY)


@overload(_added)
def _added_by_type(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
    def bfloat16(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
        return load(scratch.added, place)

    def int8(pages, scratch, place, row, below):  # type: ignore[no-untyped-def]
        sums = as_words(scratch.added)
        both = fma(load(sums, place), splat(np.float32(256)), load(sums, below))
        return fma(both, splat(scratch.steps[row]), splat(np.float32(0)))

    return int8 if _is_int8(pages) else bfloat16


# ---- an item ----


@compiled
def _turn_query(pages: Any, operand_rows: int, dim: int, scratch: Any) -> None:
    """Makes columns of the query's rows, with zeros behind what does not fill a tile."""
    rounded, words = as_words(scratch.rounded), scratch.words
    width = dim * pages.itemsize // WORD_BYTES
    for row in range(operand_rows):
        for word in range(width):
            words[word * operand_rows + row] = rounded[row * width + word]
    for i in range(width * operand_rows, -(-width // tiles.TILE_ROWS) * tiles.TILE_ROWS * operand_rows):
        words[i] = 0


@compiled
def _score_span(pages: Any, count: int, operand_rows: int, dim: int, scratch: Any) -> None:
    """All rows' scores of so many pieces."""
    places, pitch, near = scratch.places, dim * pages.itemsize, min(NEAR, count)
    for i in range(count):
        cache_tiles.ask_for_page(places[i + FAR])
        cache_tiles.clear_scores()
        for chunk in range(0, pitch, tiles.TILE_BYTES):
            q = chunk // tiles.TILE_BYTES * tiles.TILE_ROWS * operand_rows
            _score(pages, scratch.words, q, operand_rows, places[i] + chunk, pitch)
            cache_tiles.ask_for_lines(places[i + near] + chunk * PIECE)
        if pages.scaled:
            prefetch(pages.key_scales, scratch.scales[i])
            prefetch(pages.value_scales, scratch.scales[i])
        cache_tiles.store_scores(scratch.raw, i * PIECE * operand_rows, operand_rows)
    for i in range(count):
        for row in range(0, operand_rows, PADDED):
            s = i * PIECE * operand_rows + row
            cache_tiles.turn(scratch.raw, s, operand_rows, scratch.scores, row * SPAN + i * PIECE, SPAN)


@compiled
def _soften(pages: Any, row: int, size: int, low: int, high: int, rows: int, scratch: Any) -> None:
    """Turns a row's scores into weights relative to its running maximum.

    Tokens outside [low, high) weigh nothing. Notes what the row's output is to be multiplied with.
    """
    scores, s, zero = scratch.scores, row * SPAN, splat(np.float32(0))
    old = scratch.maxima[row]
    peak = splat(old)
    for i in range(0, size, LANES):
        lanes = _scores_of(pages, scratch, s + i, row, rows * SPAN + s + i)
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
    running = _weigh(pages, base, row, size, low, high, rows, scratch)
    store(scratch.sums, row * LANES, fma(running, splat(np.float32(1)), load(scratch.sums, row * LANES)))
    scratch.factors[row] = largest(shrink)


@compiled
def _add_span(pages: Any, count: int, num_rows: int, rows: int, dim: int, scratch: Any) -> None:
    """Adds the weighted values of so many pieces to the output."""
    values, weights = pointer(scratch.places, count), as_words(scratch.weights)
    pitch, step, width = dim * WORD_BYTES, PIECE * pages.itemsize // WORD_BYTES, SPAN * pages.itemsize // WORD_BYTES
    near = min(NEAR, count)
    for d in range(0, dim, VALUE_COLUMNS):
        cache_tiles.clear_sums()
        for i in range(count):
            _add(pages, weights, i * step, width, values[i] + d * WORD_BYTES, pitch)
            if d == 0:
                cache_tiles.ask_for_page(values[i + FAR])
                for chunk in range(0, dim * pages.itemsize, tiles.TILE_BYTES):
                    cache_tiles.ask_for_lines(values[i + near] + chunk * PIECE)
        cache_tiles.store_sums(scratch.added, d, dim)
    for row in range(num_rows):
        factor = splat(scratch.factors[row])
        for i in range(row * dim, (row + 1) * dim, LANES):
            lanes = _added(pages, scratch, i, row, rows * dim + i)
            store(scratch.output, i, fma(load(scratch.output, i), factor, lanes))


@compiled
def attend_with_few_rows(
    item: Any, pages: Any, table: Any, following: Any, its_table: Any, shape: Any, scratch: Any
) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch.

    Towards its end it asks for the first keys of the item that follows, which may be this one again. The tiles are
    configured for as many rows (:func:`cache_tiles.configurations`).
    """
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    num_rows = item[NUM_ROWS] * group
    rows = -(-num_rows // PADDED) * PADDED
    operand_rows, places, window = _operand_rows(pages, rows), scratch.places, shape.window
    _round(pages, num_rows, rows, dim, scratch)
    _turn_query(pages, operand_rows, dim, scratch)
    for first in range(item[FIRST], item[LAST], SPAN):
        last = min(first + SPAN, item[LAST])
        tokens = last - first
        count = -(-tokens // PIECE)
        _lay_out(item, first, count, pages, table, shape, places, scratch.scales)
        if last < item[LAST]:
            _look_ahead(item, last, pages, table, shape, pointer(places, 2 * count))
        else:
            _look_ahead(following, following[FIRST], pages, its_table, shape, pointer(places, 2 * count))
        _score_span(pages, count, operand_rows, dim, scratch)
        for row in range(num_rows):
            position = item[POSITION] + row // group
            low = position + 1 - window - first if window else 0
            _soften(pages, row, count * PIECE, low, min(position + 1, last) - first, rows, scratch)
        if tokens % PIECE and not pages.scaled:
            at = (places[2 * count - 1] - cache_tiles.address(pages.values, 0)) // WORD_BYTES
            _copy_tail(pages.values, at, tokens % PIECE, dim, scratch.tail)
            places[2 * count - 1] = cache_tiles.address(scratch.tail, 0)
        _add_span(pages, count, num_rows, rows, dim, scratch)
