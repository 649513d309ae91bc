"""Attention in matrix tiles: keys and values of a segment are laid out as tiles take them, and serve up to 32 rows.

Scores and sums are float32; queries, keys, values and the softmax's weights are bfloat16, which int8 becomes without
loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.model.kernels import tiles
from chairlift.model.kernels.attention_items import (
    FIRST,
    KV_HEAD,
    LAST,
    NUM_ROWS,
    POSITION,
    SEGMENT,
    Scratch,
    fetch,
    gather_scales,
    soften,
)
from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import as_words, for_threads
from chairlift.model.kernels.simd import LANES, fma, interleave, load, splat, store

BLOCK_ROWS = 2 * tiles.TILE_ROWS
BLOCK_TOKENS = 2 * tiles.TILE_ROWS
PAIR = 2
"""Numbers to a word."""

_multiply_whole, _multiply_half = tiles.multiply_bfloat16
_load_whole, _load_half = tiles.load_block
_store_whole, _store_half = tiles.store_block
_clear: Any = tiles.clear_block


def tile_scratch(threads: int, tile: int, head_dim: int) -> Scratch:
    """Working memory, with room for whole blocks of rows."""
    rows = -(-tile // BLOCK_ROWS) * BLOCK_ROWS
    return Scratch(
        query=for_threads(threads, rows * head_dim, np.int16),
        output=for_threads(threads, rows * head_dim, np.float32),
        maxima=for_threads(threads, rows, np.float32),
        sums=for_threads(threads, rows * LANES, np.float32),
        scores=for_threads(threads, rows * SEGMENT, np.float32),
        weights=for_threads(threads, rows * SEGMENT, np.int16),
        keys=for_threads(threads, head_dim * SEGMENT, np.int16),
        values=for_threads(threads, head_dim * SEGMENT, np.int16),
        key_scales=for_threads(threads, SEGMENT, np.float32),
        value_scales=for_threads(threads, SEGMENT, np.float32),
    )


@compiled
def _lay_out_keys(keys: Any, table: Any, head: int, first: int, last: int, shape: Any, tile_keys: Any) -> None:
    """Copies the keys of a segment: a tile is 16 tokens side by side, with two numbers of a key to a word."""
    dim, shift = shape.head_dim, shape.block_shift
    for token in range(first, last, LANES):
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + head
        k = ((block * dim) << shift) + (token & ((1 << shift) - 1))
        target = (token - first) * dim
        for d in range(0, dim, PAIR):
            interleave(keys, k + (d << shift), k + ((d + 1) << shift), tile_keys, target + d * LANES)


@compiled
def _lay_out_values(values: Any, table: Any, head: int, first: int, last: int, shape: Any, tile_values: Any) -> None:
    """Copies the values of a segment, the same number of two tokens to a word, and of the last again to whole tiles."""
    dim, shift, mask = shape.head_dim, shape.block_shift, (1 << shape.block_shift) - 1
    for token in range(first, first + -(-(last - first) // BLOCK_TOKENS) * BLOCK_TOKENS, PAIR):
        one, two = min(token, last - 1), min(token + 1, last - 1)
        v = (((np.int64(table[one >> shift]) * shape.num_kv_heads + head) << shift) + (one & mask)) * dim
        w = (((np.int64(table[two >> shift]) * shape.num_kv_heads + head) << shift) + (two & mask)) * dim
        target = (token - first) * dim
        for d in range(0, dim, LANES):
            interleave(values, v + d, w + d, tile_values, target + PAIR * d)


@compiled
def _score(scratch: Any, row: int, whole: bool, tokens: int, dim: int) -> None:
    """Scores of a block of rows against a segment's tokens."""
    query, keys, width = as_words(scratch.query), as_words(scratch.keys), dim // PAIR
    for token in range(0, tokens, BLOCK_TOKENS):
        _clear()
        for word in range(0, width, LANES):
            k = token * width + word * LANES
            if whole:
                _multiply_whole(query, row * width + word, width, keys, k, LANES, LANES * width)
            else:
                _multiply_half(query, row * width + word, width, keys, k, LANES, LANES * width)
        if whole:
            _store_whole(scratch.scores, row * SEGMENT + token, SEGMENT)
        else:
            _store_half(scratch.scores, row * SEGMENT + token, SEGMENT)


@compiled
def _soften(scratch: Any, row: int, position: int, first: int, tokens: int, end: int, shape: Any, scaled: bool) -> None:
    """Weighs the tokens that a row sees; the others up to ``tokens`` weigh nothing."""
    low = position + 1 - shape.window - first if shape.window else 0
    before = scratch.maxima[row]
    factor = soften(scratch, row, row * SEGMENT, tokens, low, min(position + 1, end) - first, scaled)
    if scratch.maxima[row] != before:
        zero = splat(np.float32(0))
        for d in range(row * shape.head_dim, (row + 1) * shape.head_dim, LANES):
            store(scratch.output, d, fma(load(scratch.output, d), factor, zero))


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
                _multiply_whole(weights, row * width + word, width, values, word * dim + d, dim, LANES)
            else:
                _multiply_half(weights, row * width + word, width, values, word * dim + d, dim, LANES)
        if whole:
            _store_whole(scratch.output, row * dim + d, dim)
        else:
            _store_half(scratch.output, row * dim + d, dim)


@compiled
def attend_in_tiles(item: Any, pages: Any, table: Any, shape: Any, scratch: Any) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch."""
    scaled, group = pages.scaled, shape.num_heads // shape.num_kv_heads
    dim, head, num_rows = shape.head_dim, item[KV_HEAD], item[NUM_ROWS] * group
    for first in range(item[FIRST], item[LAST], SEGMENT):
        last = min(first + SEGMENT, item[LAST])
        if last < item[LAST]:
            fetch(pages, table, head, last, min(last + SEGMENT, item[LAST]), shape)
        if scaled:
            gather_scales(pages, table, head, first, last, shape, scratch)
        _lay_out_keys(pages.keys, table, head, first, last, shape, scratch.keys)
        _lay_out_values(pages.values, table, head, first, last, shape, scratch.values)
        for row in range(0, num_rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, num_rows - row)
            whole = count > tiles.TILE_ROWS
            end = min(last, item[POSITION] + (row + count - 1) // group + 1)
            tokens = -(-(end - first) // BLOCK_TOKENS) * BLOCK_TOKENS
            if tokens <= 0:
                continue
            _score(scratch, row, whole, tokens, dim)
            for r in range(row, row + count):
                _soften(scratch, r, item[POSITION] + r // group, first, tokens, end, shape, scaled)
            _accumulate(scratch, row, whole, tokens, dim)
