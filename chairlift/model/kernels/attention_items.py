"""What all ways to attend have in common: items of work, pages, and the softmax.

The work is cut into items: a tile of query rows of one sequence, the query heads that share one key/value head, and a
range of the sequence's tokens. Within an item the tokens pass by in segments small enough to stay in the first-level
cache. Where a tile's tokens are cut into several items, the partial results are merged afterwards (Dao et al.,
"Flash-Decoding", 2023; the softmax is that of Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018).

Scores are kept in units of log2, so that 2^x serves as the exponential.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import CACHE_LINE, part, pointer
from chairlift.model.kernels.rows import int8_scale
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

SEGMENT = 64
PADDED = 4
"""Query rows are filled up with zeros to a multiple of this."""

# Columns of an item: the sequence, the first of its tile's query rows, how many, the position of the first, the
# key/value head, the tokens attended to (first and one past the last), and the place of its partial result, or WHOLE.
ITEM = 8
SEQUENCE, ROW, NUM_ROWS, POSITION, KV_HEAD, FIRST, LAST, PARTIAL = range(ITEM)
WHOLE = -1
# Columns of a merge: first partial result and how many, then query row, number of rows and key/value head.
MERGE_PARTIAL, MERGE_COUNT, MERGE_ROW, MERGE_NUM_ROWS, MERGE_KV_HEAD = range(5)


class Shape(NamedTuple):
    """Sizes that the kernel needs.

    ``kind`` says how to attend: in vectors of float32, or in tiles and by dot products of bfloat16. ``block_shift``
    is the binary logarithm of the block's size: a division for every token would take longer than its products.
    ``window`` is 0 for none; ``tile`` is the row capacity of a work item.
    """

    kind: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_shift: int
    window: int
    tile: int


class Pages(NamedTuple):
    """Paged keys and values, flat, of one layer or of all, end to end.

    For int8 there is a float32 scale for each token and head beside them, [blocks, key/value heads, block size]; else
    the scales are empty.
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


class LayerPages(NamedTuple):
    """Pointers to one layer's pages, whether there are scales, and the bytes of a number."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    scaled: bool
    itemsize: int


class Scratch(NamedTuple):
    """Working memory of all threads, or pointers to that of one; float32 but where its kind has bfloat16.

    ``query`` and ``output`` hold a tile's rows, ``maxima`` and ``sums`` its softmax state (the sums in 16 lanes).
    ``scores`` and ``weights`` are those of a segment, which may share their place; ``keys`` and ``values`` a segment's,
    where they are not read as they lie; ``key_scales`` and ``value_scales`` its scales.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    scores: Any
    weights: Any
    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


@compiled
def pages_of_layer(pages: Any, layer: int, num_layers: int) -> Any:
    """One layer's part of the pages of so many."""
    size, scales = len(pages.keys) // num_layers, len(pages.key_scales) // num_layers
    return LayerPages(
        pointer(pages.keys, layer * size),
        pointer(pages.values, layer * size),
        pointer(pages.key_scales, layer * scales),
        pointer(pages.value_scales, layer * scales),
        scales > 0,
        pages.keys.itemsize,
    )


@compiled
def own_scratch(scratch: Any, thread: int, threads: int) -> Any:
    """A thread's working memory."""
    return Scratch(
        part(scratch.query, thread, threads),
        part(scratch.output, thread, threads),
        part(scratch.maxima, thread, threads),
        part(scratch.sums, thread, threads),
        part(scratch.scores, thread, threads),
        part(scratch.weights, thread, threads),
        part(scratch.keys, thread, threads),
        part(scratch.values, thread, threads),
        part(scratch.key_scales, thread, threads),
        part(scratch.value_scales, thread, threads),
    )


@compiled
def soften(scratch: Any, row: int, s: int, size: int, low: int, high: int, scaled: bool) -> Any:
    """Turns a row's scores, from ``s`` on, into weights relative to its running maximum, which stand at the same place.

    Tokens outside [low, high) weigh nothing. Where keys and values are ``scaled``, scores take the keys' scales first,
    and weights the values' in the end. Returns what the row's output has to be multiplied with, in all lanes.
    """
    scores, maxima, sums = scratch.scores, scratch.maxima, scratch.sums
    old = maxima[row]
    peak, zero = splat(old), splat(np.float32(0))
    for i in range(0, size, LANES):
        lanes = load(scores, s + i)
        if scaled:
            lanes = fma(lanes, load(scratch.key_scales, i), zero)
            store(scores, s + i, lanes)
        if low > i or high < i + LANES:
            lanes = keep_between(lanes, low - i, high - i)
            store(scores, s + i, lanes)
        peak = maximum(lanes, peak)
    new = largest(peak)
    maxima[row] = new
    # A row that has seen nothing yet has no maximum to subtract.
    base = np.float32(0) if new == -np.inf else new
    one, minus = splat(np.float32(1)), splat(-base)
    factor = exp2(fma(splat(old), one, minus))
    running = fma(load(sums, row * LANES), factor, zero)
    for i in range(0, size, LANES):
        weights = exp2(fma(load(scores, s + i), one, minus))
        running = fma(weights, one, running)
        if scaled:
            weights = fma(weights, load(scratch.value_scales, i), zero)
        store(scratch.weights, s + i, weights)
    store(sums, row * LANES, running)
    return factor


@compiled
def gather_scales(pages: Any, table: Any, head: int, first: int, last: int, shape: Any, scratch: Any) -> None:
    """Copies the scales of tokens [first, last) side by side, and fills their places up with zeros."""
    for token in range(last - first, SEGMENT):
        scratch.key_scales[token] = 0
        scratch.value_scales[token] = 0
    shift = shape.block_shift
    for token in range(first, last):
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + head
        place = (block << shift) + (token & ((1 << shift) - 1))
        scratch.key_scales[token - first] = pages.key_scales[place]
        scratch.value_scales[token - first] = pages.value_scales[place]


@compiled
def fetch(pages: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Asks for the blocks of tokens [first, last), which lie too far apart for the processor to foresee."""
    size = shape.head_dim << shape.block_shift
    for i in range(first >> shape.block_shift, ((last - 1) >> shape.block_shift) + 1):
        block = (np.int64(table[i]) * shape.num_kv_heads + head) * size
        for offset in range(0, size, CACHE_LINE // pages.itemsize):
            prefetch(pages.keys, block + offset)
            prefetch(pages.values, block + offset)


@compiled
def start_item(item: Any, query: Any, stride: int, scale: float, shape: Any, scratch: Any) -> None:
    """Loads the item's query rows, scaled, and clears the state of its softmax."""
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    num_rows = item[NUM_ROWS] * group
    zero, factor = splat(np.float32(0)), splat(scale)
    for r in range(-(-num_rows // PADDED) * PADDED):
        scratch.maxima[r] = -np.inf
        store(scratch.sums, r * LANES, zero)
        source = (item[ROW] + r // group) * stride + (item[KV_HEAD] * group + r % group) * dim
        for d in range(0, dim, LANES):
            lanes = zero
            if r < num_rows:
                lanes = fma(load(query, source + d), factor, zero)
            store(scratch.query, r * dim + d, lanes)
            store(scratch.output, r * dim + d, zero)


@compiled
def finish_item(item: Any, output: Any, shape: Any, scratch: Any) -> None:
    """Divides by the sums of the weights and writes the rows out."""
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    zero = splat(np.float32(0))
    for r in range(item[NUM_ROWS] * group):
        share = splat(np.float32(1) / total(load(scratch.sums, r * LANES)))
        target = ((item[ROW] + r // group) * shape.num_heads + item[KV_HEAD] * group + r % group) * dim
        for d in range(0, dim, LANES):
            store(output, target + d, fma(load(scratch.output, r * dim + d), share, zero))


@compiled
def keep_partial(item: Any, partial: Any, shape: Any, scratch: Any) -> None:
    """Sets the item's unfinished rows aside: per row its output, then its maximum and its sum."""
    dim = shape.head_dim
    for r in range(item[NUM_ROWS] * (shape.num_heads // shape.num_kv_heads)):
        kept = partial[item[PARTIAL], r]
        for d in range(dim):
            kept[d] = scratch.output[r * dim + d]
        kept[dim] = scratch.maxima[r]
        kept[dim + 1] = total(load(scratch.sums, r * LANES))


@compiled
def merge_partials(merge: Any, partial: Any, output: Any, shape: Any) -> None:
    """Merges the partial results of one tile and writes its rows out."""
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    parts = partial[merge[MERGE_PARTIAL] : merge[MERGE_PARTIAL] + merge[MERGE_COUNT]]
    zero = splat(np.float32(0))
    for r in range(merge[MERGE_NUM_ROWS] * group):
        peak = np.float32(-np.inf)
        for piece in parts:
            peak = max(peak, piece[r, dim])
        whole = np.float32(0)
        for piece in parts:
            whole += np.float32(2) ** (piece[r, dim] - peak) * piece[r, dim + 1]
        target = ((merge[MERGE_ROW] + r // group) * shape.num_heads + merge[MERGE_KV_HEAD] * group + r % group) * dim
        for d in range(0, dim, LANES):
            lanes = zero
            for piece in parts:
                share = np.float32(np.float32(2) ** (piece[r, dim] - peak) / whole)
                lanes = fma(load(piece[r], d), splat(share), lanes)
            store(output, target + d, lanes)


@compiled
def write_token(key: Any, k: int, value: Any, v: int, slot: int, pages: Any, shape: Any, rounded: Any) -> None:
    """Puts one token's keys and values, which begin at ``key[k]`` and ``value[v]``, into their slot.

    ``rounded`` has room for a head of keys, which lie as far apart in the cache as a block is long.
    """
    dim, block_size = shape.head_dim, 1 << shape.block_shift
    block, offset = slot >> shape.block_shift, slot & (block_size - 1)
    zero, key_factor, value_factor = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(1))
    for head in range(shape.num_kv_heads):
        place = block * shape.num_kv_heads + head
        if pages.scaled:
            key_scale, value_scale = int8_scale(key, k, dim), int8_scale(value, v, dim)
            pages.key_scales[place * block_size + offset] = key_scale
            pages.value_scales[place * block_size + offset] = value_scale
            key_factor, value_factor = splat(np.float32(1) / key_scale), splat(np.float32(1) / value_scale)
        target = place * dim * block_size
        for d in range(0, dim, LANES):
            store(rounded, d, fma(load(key, k + d), key_factor, zero))
            store(pages.values, target + offset * dim + d, fma(load(value, v + d), value_factor, zero))
        for d in range(dim):
            pages.keys[target + d * block_size + offset] = rounded[d]
        k, v = k + dim, v + dim
