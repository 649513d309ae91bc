"""Attention in matrix tiles for many query rows: keys and values of a segment are copied once, and serve up to 32 rows.

Scores come out with a row for each token, since keys lie in the cache as the first operand of a product takes them.
Sixteen query rows are then the lanes of a vector, and their softmax never has to look across lanes; its weights are
turned into rows in the end.

Scores and sums are float32; queries, keys, values and the softmax's weights are bfloat16, which int8 becomes without
loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.model.kernels import tiles
from chairlift.model.kernels.attention_items import (
    FIRST,
    KV_HEAD,
    LAST,
    NUM_ROWS,
    PADDED,
    POSITION,
    SEGMENT,
    fetch,
    gather_scales,
    place_of,
)
from chairlift.model.kernels.cache_tiles import PIECE, turn
from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import WORD_BYTES, as_words, for_threads, pointer
from chairlift.model.kernels.simd import (
    LANES,
    byte_of_words,
    exp2,
    fma,
    keep_tokens,
    load,
    maximum,
    pair_up,
    splat,
    store,
)

BLOCK_ROWS = 2 * tiles.TILE_ROWS
BLOCK_TOKENS = 2 * tiles.TILE_ROWS
PAIR = 2
"""Numbers to a word."""
LOWEST = np.float32(-3e38)

_multiply_whole, _multiply_half = tiles.multiply_bfloat16
_load_whole, _load_half = tiles.load_block
_store_whole, _store_half = tiles.store_block
_clear: Any = tiles.clear_block


class TileScratch(NamedTuple):
    """Working memory of all threads, or pointers to that of one.

    What is in :class:`~chairlift.model.kernels.attention_items.Scratch` too is the same. ``turned`` are a block's
    queries as columns of words, and ``pairs`` its weights, of two tokens to a word. Of each row there are the first
    token it sees and one past the last, ``lows`` and ``highs``, what its output is multiplied with (``factors``), and
    the ``running`` sum of its weights.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    turned: Any
    scores: Any
    pairs: Any
    weights: Any
    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    lows: Any
    highs: Any
    factors: Any
    running: Any


def tile_scratch(threads: int, tile: int, head_dim: int) -> TileScratch:
    """Working memory, with room for whole blocks of rows."""
    rows = -(-tile // BLOCK_ROWS) * BLOCK_ROWS
    return TileScratch(
        query=for_threads(threads, rows * head_dim, np.int16),
        output=for_threads(threads, rows * head_dim, np.float32),
        maxima=for_threads(threads, rows, np.float32),
        sums=for_threads(threads, rows * LANES, np.float32),
        turned=for_threads(threads, rows * head_dim // PAIR, np.int32),
        scores=for_threads(threads, BLOCK_ROWS * SEGMENT, np.float32),
        pairs=for_threads(threads, BLOCK_ROWS * SEGMENT, np.int16),
        weights=for_threads(threads, BLOCK_ROWS * SEGMENT, np.int16),
        keys=for_threads(threads, head_dim * SEGMENT, np.int16),
        values=for_threads(threads, head_dim * SEGMENT, np.int16),
        key_scales=for_threads(threads, SEGMENT, np.float32),
        value_scales=for_threads(threads, SEGMENT, np.float32),
        lows=for_threads(threads, rows, np.float32),
        highs=for_threads(threads, rows, np.float32),
        factors=for_threads(threads, rows, np.float32),
        running=for_threads(threads, rows, np.float32),
    )


@compiled
def _start(item: Any, shape: Any, scratch: Any) -> None:
    """Makes columns of the query's rows, and notes which tokens each sees."""
    group, width, window = shape.num_heads // shape.num_kv_heads, shape.head_dim // PAIR, shape.window
    num_rows, query = item[NUM_ROWS] * group, as_words(scratch.query)
    for row in range(0, num_rows, tiles.TILE_ROWS):
        block = row // BLOCK_ROWS * BLOCK_ROWS
        for word in range(0, width, PADDED):
            target = block * width + word * BLOCK_ROWS + row - block
            turn(query, row * width + word, width, scratch.turned, target, BLOCK_ROWS)
    for row in range(-(-num_rows // BLOCK_ROWS) * BLOCK_ROWS):
        # What is filled up sees what the last row does.
        position = item[POSITION] + min(row, num_rows - 1) // group
        scratch.lows[row] = position + 1 - window if window else 0
        scratch.highs[row] = min(position + 1, item[LAST])
        scratch.maxima[row], scratch.running[row] = -np.inf, 0


@compiled
def _copy_keys(pages: Any, table: Any, head: int, first: int, last: int, shape: Any, keys: Any) -> None:
    """Copies the keys of a segment, as bfloat16; what is behind the last token may be anything."""
    dim, one, zero = shape.head_dim, splat(np.float32(1)), splat(np.float32(0))
    for token in range(first, last, PIECE):
        k = place_of(pages, table, token, head, shape)
        target = (token - first) * dim
        if pages.scaled:
            for i in range(0, PIECE * dim, LANES):
                store(keys, target + i, fma(load(pages.keys, k + i), one, zero))
        else:
            source, words = pointer(as_words(pages.keys), k // PAIR), pointer(as_words(keys), target // PAIR)
            for i in range(PIECE * dim // PAIR):
                words[i] = source[i]


@compiled
def _copy_values(pages: Any, table: Any, head: int, first: int, last: int, shape: Any, values: Any) -> None:
    """Copies the values of a segment, two tokens' to a word, and fills up with zeros to whole blocks."""
    dim, turns, target = shape.head_dim, WORD_BYTES // pages.itemsize, as_words(values)
    for token in range(first, last, PIECE):
        source = pointer(as_words(pages.values), place_of(pages, table, token, head, shape) // turns)
        t = (token - first) // PAIR * dim
        if pages.scaled:
            for row in range(PIECE // turns):
                for half in range(turns // PAIR):
                    for d in range(0, dim, LANES):
                        a = byte_of_words(source, row * dim + d, PAIR * half)
                        b = byte_of_words(source, row * dim + d, PAIR * half + 1)
                        pair_up(a, b, values, PAIR * (t + (row * (turns // PAIR) + half) * dim + d))
        else:
            for i in range(PIECE // PAIR * dim):
                target[t + i] = source[i]
    end = first + -(-(last - first) // BLOCK_TOKENS) * BLOCK_TOKENS
    if last % PAIR:
        # Behind the last token there may be anything, which no weight of zero makes zero.
        row = (last - first) // PAIR * dim
        for d in range(dim):
            target[row + d] &= 0xFFFF
    for i in range(-(-(last - first) // PAIR) * dim, (end - first) // PAIR * dim):
        target[i] = 0


@compiled
def _score(scratch: Any, row: int, tokens: int, dim: int) -> None:
    """Scores of a segment's tokens, each with a block of rows."""
    keys, width = as_words(scratch.keys), dim // PAIR
    for token in range(0, tokens, BLOCK_TOKENS):
        _clear()
        for word in range(0, width, LANES):
            q = row * width + word * BLOCK_ROWS
            _multiply_whole(keys, token * width + word, width, scratch.turned, q, BLOCK_ROWS, LANES)
        _store_whole(scratch.scores, token * BLOCK_ROWS, BLOCK_ROWS)


@compiled
def _peaks(scratch: Any, row: int, strip: int, first: int, tokens: int, scaled: bool) -> Any:
    """The largest scores of sixteen rows, so far and in this segment, whose scores get their scales."""
    lows, highs = load(scratch.lows, row), load(scratch.highs, row)
    all_see = scratch.lows[row + LANES - 1] <= first and first + tokens <= scratch.highs[row]
    peak, zero = load(scratch.maxima, row), splat(np.float32(0))
    for token in range(tokens):
        place = token * BLOCK_ROWS + strip
        lanes = load(scratch.scores, place)
        if scaled:
            lanes = fma(lanes, splat(scratch.key_scales[token]), zero)
        if not all_see:
            lanes = keep_tokens(lanes, np.float32(first + token), lows, highs)
        if scaled or not all_see:
            store(scratch.scores, place, lanes)
        peak = maximum(lanes, peak)
    return peak


@compiled
def _soften(scratch: Any, row: int, strip: int, first: int, tokens: int, scaled: bool) -> None:
    """Turns scores of sixteen rows into weights relative to their running maxima, two tokens to a word.

    Tokens that a row does not see weigh nothing. Notes what the rows' outputs have to be multiplied with.
    """
    old = load(scratch.maxima, row)
    peak = _peaks(scratch, row, strip, first, tokens, scaled)
    store(scratch.maxima, row, peak)
    # A row that has seen nothing yet has no maximum to subtract.
    zero, one, minus_one = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(-1))
    minus = fma(maximum(peak, splat(LOWEST)), minus_one, zero)
    factor = exp2(fma(old, one, minus))
    store(scratch.factors, row, factor)
    running = fma(load(scratch.running, row), factor, zero)
    for token in range(0, tokens, PAIR):
        place = token * BLOCK_ROWS + strip
        a = exp2(fma(load(scratch.scores, place), one, minus))
        b = exp2(fma(load(scratch.scores, place + BLOCK_ROWS), one, minus))
        running = fma(b, one, fma(a, one, running))
        if scaled:
            a = fma(a, splat(scratch.value_scales[token]), zero)
            b = fma(b, splat(scratch.value_scales[token + 1]), zero)
        pair_up(a, b, scratch.pairs, token * BLOCK_ROWS + PAIR * strip)
    store(scratch.running, row, running)


@compiled
def _turn_weights(scratch: Any, count: int, tokens: int) -> None:
    """Makes rows of the weights of so many query rows."""
    pairs, weights = as_words(scratch.pairs), as_words(scratch.weights)
    for word in range(0, tokens // PAIR, LANES):
        for row in range(0, count, PADDED):
            turn(pairs, word * BLOCK_ROWS + row, BLOCK_ROWS, weights, row * SEGMENT // PAIR + word, SEGMENT // PAIR)


@compiled
def _accumulate(scratch: Any, row: int, whole: bool, tokens: int, dim: int) -> None:
    """Adds a segment's weighted values to a block of rows of the output."""
    weights, values, width = as_words(scratch.weights), as_words(scratch.values), SEGMENT // PAIR
    for d in range(0, dim, 2 * LANES):
        if whole:
            _load_whole(scratch.output, row * dim + d, dim)
        else:
            _load_half(scratch.output, row * dim + d, dim)
        for word in range(0, tokens // PAIR, LANES):
            if whole:
                _multiply_whole(weights, word, width, values, word * dim + d, dim, LANES)
            else:
                _multiply_half(weights, word, width, values, word * dim + d, dim, LANES)
        if whole:
            _store_whole(scratch.output, row * dim + d, dim)
        else:
            _store_half(scratch.output, row * dim + d, dim)


@compiled
def _attend_block(scratch: Any, row: int, count: int, first: int, tokens: int, dim: int, scaled: bool) -> None:
    """Attends with a block of rows to a segment."""
    zero, one = splat(np.float32(0)), np.float32(1)
    _score(scratch, row, tokens, dim)
    for strip in range(0, count, LANES):
        _soften(scratch, row + strip, strip, first, tokens, scaled)
    _turn_weights(scratch, count, tokens)
    for r in range(row, row + count):
        if scratch.factors[r] != one:
            for d in range(r * dim, (r + 1) * dim, LANES):
                store(scratch.output, d, fma(load(scratch.output, d), splat(scratch.factors[r]), zero))
    _accumulate(scratch, row, count > tiles.TILE_ROWS, tokens, dim)


@compiled
def attend_in_tiles(item: Any, pages: Any, table: Any, shape: Any, scratch: Any) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch."""
    scaled, group = pages.scaled, shape.num_heads // shape.num_kv_heads
    dim, head, num_rows = shape.head_dim, item[KV_HEAD], item[NUM_ROWS] * group
    _start(item, shape, scratch)
    for first in range(item[FIRST], item[LAST], SEGMENT):
        last = min(first + SEGMENT, item[LAST])
        if last < item[LAST]:
            fetch(pages, table, head, last, min(last + SEGMENT, item[LAST]), shape)
        if scaled:
            gather_scales(pages, table, head, first, last, shape, scratch)
        _copy_keys(pages, table, head, first, last, shape, scratch.keys)
        _copy_values(pages, table, head, first, last, shape, scratch.values)
        for row in range(0, num_rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, num_rows - row)
            end = min(last, item[POSITION] + (row + count - 1) // group + 1)
            tokens = -(-(end - first) // BLOCK_TOKENS) * BLOCK_TOKENS
            if tokens > 0:
                _attend_block(scratch, row, count, first, tokens, dim, scaled)
    for row in range(num_rows):
        store(scratch.sums, row * LANES, splat(np.float32(0)))
        scratch.sums[row * LANES] = scratch.running[row]
