"""Paged attention for the CPU: an online softmax that walks the block table in place.

The work is cut into items: a tile of query rows of one sequence, the query heads that share one key/value head, and a
range of the sequence's tokens. Within an item the tokens pass by in segments small enough to stay in the first-level
cache, and rows are taken four at a time, so that each key and value that is loaded serves four rows. Where a tile's
tokens are cut into several items, the partial results are merged afterwards (Dao et al., "Flash-Decoding", 2023; the
softmax is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).

Scores are kept in units of log2, so that 2^x serves as the exponential.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from chairlift.model.kernels.compiling import SOURCE_DIGEST, compiled
from chairlift.model.kernels.memory import CACHE_LINE, aligned_floats
from chairlift.model.kernels.rows import int8_scale
from chairlift.model.kernels.simd import (
    LANES,
    broadcast,
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
from chairlift.model.kernels.threads import meet

SEGMENT = 64
ROWS = 4

# Columns of an item: the sequence, the first of its tile's query rows, how many, the position of the first, the
# key/value head, the tokens attended to (first and one past the last), and the place of its partial result, or WHOLE.
SEQUENCE, ROW, NUM_ROWS, POSITION, KV_HEAD, FIRST, LAST, PARTIAL = range(8)
WHOLE = -1
# Columns of a merge: first partial result and how many, then query row, number of rows and key/value head.
MERGE_PARTIAL, MERGE_COUNT, MERGE_ROW, MERGE_NUM_ROWS, MERGE_KV_HEAD = range(5)


class Shape(NamedTuple):
    """Sizes that the kernel needs.

    ``block_shift`` is the binary logarithm of the block's size: a division for every token would take longer than its
    products. ``window`` is 0 for none; ``tile`` is the row capacity of a work item.
    """

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


class Scratch(NamedTuple):
    """Working memory of one thread; all float32 but ``keys``, which has the cache's type.

    ``query`` and ``output`` hold a tile's rows, ``maxima`` and ``sums`` its softmax state (the sums in 16 lanes),
    ``scores`` and ``rescale`` the state of four rows within a segment, ``keys`` a segment of keys where blocks are
    shorter than a vector, ``key_scales`` and ``value_scales`` those of a segment.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    scores: Any
    rescale: Any
    keys: Any
    key_scales: Any
    value_scales: Any


@compiled
def _score(query: Any, q: int, dim: int, keys: Any, k: int, stride: int, scores: Any, s: int) -> None:
    """Scores of four rows against sixteen tokens, whose keys lie side by side at ``k + d * stride``."""
    zero = splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for d in range(dim):
        key = load(keys, k + d * stride)
        s0 = fma(broadcast(query, q + d), key, s0)
        s1 = fma(broadcast(query, q + dim + d), key, s1)
        s2 = fma(broadcast(query, q + 2 * dim + d), key, s2)
        s3 = fma(broadcast(query, q + 3 * dim + d), key, s3)
    store(scores, s, s0)
    store(scores, s + SEGMENT, s1)
    store(scores, s + 2 * SEGMENT, s2)
    store(scores, s + 3 * SEGMENT, s3)


@compiled
def _score_two(query: Any, q: int, dim: int, keys: Any, k: int, other: int, stride: int, scores: Any, s: int) -> None:
    """The same for twice as many tokens, the second half of whose keys begins at ``other``: sums that do not wait for
    one another keep the processor busy."""
    zero = splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    t0, t1, t2, t3 = zero, zero, zero, zero
    for d in range(dim):
        key, second = load(keys, k + d * stride), load(keys, other + d * stride)
        q0, q1 = broadcast(query, q + d), broadcast(query, q + dim + d)
        q2, q3 = broadcast(query, q + 2 * dim + d), broadcast(query, q + 3 * dim + d)
        s0, t0 = fma(q0, key, s0), fma(q0, second, t0)
        s1, t1 = fma(q1, key, s1), fma(q1, second, t1)
        s2, t2 = fma(q2, key, s2), fma(q2, second, t2)
        s3, t3 = fma(q3, key, s3), fma(q3, second, t3)
    store(scores, s, s0)
    store(scores, s + SEGMENT, s1)
    store(scores, s + 2 * SEGMENT, s2)
    store(scores, s + 3 * SEGMENT, s3)
    store(scores, s + LANES, t0)
    store(scores, s + SEGMENT + LANES, t1)
    store(scores, s + 2 * SEGMENT + LANES, t2)
    store(scores, s + 3 * SEGMENT + LANES, t3)


@compiled
def _soften(scratch: Any, row: int, size: int, low: int, high: int, scaled: bool) -> None:
    """Turns a row's scores into weights relative to its running maximum. Tokens outside [low, high) weigh nothing.

    Where keys and values are ``scaled``, scores take the keys' scales first, and weights the values' in the end.
    """
    scores, maxima, sums = scratch.scores, scratch.maxima, scratch.sums
    s = row % ROWS * SEGMENT
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
    store(scratch.rescale, row % ROWS * LANES, factor)
    running = fma(load(sums, row * LANES), factor, zero)
    for i in range(0, size, LANES):
        weights = exp2(fma(load(scores, s + i), one, minus))
        running = fma(weights, one, running)
        if scaled:
            weights = fma(weights, load(scratch.value_scales, i), zero)
        store(scores, s + i, weights)
    store(sums, row * LANES, running)


@compiled
def _accumulate(scratch: Any, o: int, values: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Adds the weighted values of tokens [first, last) to four rows of the output, 32 columns at a time, or 16."""
    dim, shift = shape.head_dim, shape.block_shift
    output, scores, rescale, zero = scratch.output, scratch.scores, scratch.rescale, splat(np.float32(0))
    f0, f1, f2, f3 = load(rescale, 0), load(rescale, LANES), load(rescale, 2 * LANES), load(rescale, 3 * LANES)
    for d in range(0, dim, 2 * LANES):
        second = d + LANES if d + LANES < dim else d  # the same again, where there is only one
        o0, p0 = fma(load(output, o + d), f0, zero), fma(load(output, o + second), f0, zero)
        o1, p1 = fma(load(output, o + dim + d), f1, zero), fma(load(output, o + dim + second), f1, zero)
        o2, p2 = fma(load(output, o + 2 * dim + d), f2, zero), fma(load(output, o + 2 * dim + second), f2, zero)
        o3, p3 = fma(load(output, o + 3 * dim + d), f3, zero), fma(load(output, o + 3 * dim + second), f3, zero)
        token = first
        while token < last:
            end = min(last, ((token >> shift) + 1) << shift)
            block = np.int64(table[token >> shift]) * shape.num_kv_heads + head
            v = ((block << shift) + (token & ((1 << shift) - 1))) * dim
            for s in range(token - first, end - first):
                value, beside = load(values, v + d), load(values, v + second)
                w0, w1 = broadcast(scores, s), broadcast(scores, s + SEGMENT)
                w2, w3 = broadcast(scores, s + 2 * SEGMENT), broadcast(scores, s + 3 * SEGMENT)
                o0, p0 = fma(w0, value, o0), fma(w0, beside, p0)
                o1, p1 = fma(w1, value, o1), fma(w1, beside, p1)
                o2, p2 = fma(w2, value, o2), fma(w2, beside, p2)
                o3, p3 = fma(w3, value, o3), fma(w3, beside, p3)
                v += dim
            token = end
        store(output, o + d, o0)
        store(output, o + dim + d, o1)
        store(output, o + 2 * dim + d, o2)
        store(output, o + 3 * dim + d, o3)
        store(output, o + second, p0)
        store(output, o + dim + second, p1)
        store(output, o + 2 * dim + second, p2)
        store(output, o + 3 * dim + second, p3)


@compiled
def _gather_keys(bits: Any, keys: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Copies the keys of tokens [first, last) to ``keys`` as [dim, SEGMENT], where blocks are shorter than a vector."""
    shift = shape.block_shift
    for token in range(first, last):
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + head
        k = ((block * shape.head_dim) << shift) + (token & ((1 << shift) - 1))
        for d in range(shape.head_dim):
            keys[d * SEGMENT + token - first] = bits[k + (d << shift)]


@compiled
def _gather_scales(pages: Any, table: Any, head: int, first: int, last: int, shape: Any, scratch: Any) -> None:
    """Copies the scales of tokens [first, last) side by side."""
    shift = shape.block_shift
    for token in range(first, last):
        block = np.int64(table[token >> shift]) * shape.num_kv_heads + head
        place = (block << shift) + (token & ((1 << shift) - 1))
        scratch.key_scales[token - first] = pages.key_scales[place]
        scratch.value_scales[token - first] = pages.value_scales[place]


@compiled
def fetch(keys: Any, values: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Asks for the blocks of tokens [first, last), which lie too far apart for the processor to foresee."""
    size = shape.head_dim << shape.block_shift
    for i in range(first >> shape.block_shift, ((last - 1) >> shape.block_shift) + 1):
        block = (np.int64(table[i]) * shape.num_kv_heads + head) * size
        for offset in range(0, size, CACHE_LINE // keys.itemsize):
            prefetch(keys, block + offset)
            prefetch(values, block + offset)


@compiled
def _key(table: Any, token: int, head: int, shape: Any) -> Any:
    """Where the keys of a token and those behind it in its block begin."""
    block = np.int64(table[token >> shape.block_shift]) * shape.num_kv_heads + head
    return ((block * shape.head_dim) << shape.block_shift) + (token & ((1 << shape.block_shift) - 1))


@compiled
def attend_item(item: Any, pages: Any, table: Any, shape: Any, scratch: Any) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch."""
    keys, values, scaled = pages.keys, pages.values, len(pages.key_scales) > 0
    group = shape.num_heads // shape.num_kv_heads
    dim, shift, head = shape.head_dim, shape.block_shift, item[KV_HEAD]
    block_size = 1 << shift
    num_rows = item[NUM_ROWS] * group
    for first in range(item[FIRST], item[LAST], SEGMENT):
        last = min(first + SEGMENT, item[LAST])
        if last < item[LAST]:
            fetch(keys, values, table, head, last, min(last + SEGMENT, item[LAST]), shape)
        if scaled:
            _gather_scales(pages, table, head, first, last, shape, scratch)
        if block_size < LANES:
            _gather_keys(keys, scratch.keys, table, head, first, last, shape)
        for row in range(0, num_rows, ROWS):
            newest = item[POSITION] + (min(row + ROWS, num_rows) - 1) // group
            end = min(last, newest + 1)
            token = first
            while token < end:
                s = token - first
                two = token + LANES < end
                if block_size < LANES:
                    if two:
                        _score_two(
                            scratch.query, row * dim, dim, scratch.keys, s, s + LANES, SEGMENT, scratch.scores, s
                        )
                    else:
                        _score(scratch.query, row * dim, dim, scratch.keys, s, SEGMENT, scratch.scores, s)
                else:
                    k = _key(table, token, head, shape)
                    if two:
                        other = _key(table, token + LANES, head, shape)
                        _score_two(scratch.query, row * dim, dim, keys, k, other, block_size, scratch.scores, s)
                    else:
                        _score(scratch.query, row * dim, dim, keys, k, block_size, scratch.scores, s)
                token += 2 * LANES
            for r in range(row, row + ROWS):
                position = item[POSITION] + r // group
                low = position + 1 - shape.window - first if shape.window else 0
                _soften(scratch, r, end - first, low, min(position + 1, end) - first, scaled)
            _accumulate(scratch, row * dim, values, table, head, first, end, shape)


@compiled
def start_item(item: Any, query: Any, stride: int, scale: float, shape: Any, scratch: Any) -> None:
    """Loads the item's query rows, scaled, and clears the state of its softmax."""
    group, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    num_rows = item[NUM_ROWS] * group
    zero, factor = splat(np.float32(0)), splat(scale)
    for r in range(-(-num_rows // ROWS) * ROWS):
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
        for part in parts:
            peak = max(peak, part[r, dim])
        whole = np.float32(0)
        for part in parts:
            whole += np.float32(2) ** (part[r, dim] - peak) * part[r, dim + 1]
        target = ((merge[MERGE_ROW] + r // group) * shape.num_heads + merge[MERGE_KV_HEAD] * group + r % group) * dim
        for d in range(0, dim, LANES):
            lanes = zero
            for part in parts:
                share = np.float32(np.float32(2) ** (part[r, dim] - peak) / whole)
                lanes = fma(load(part[r], d), splat(share), lanes)
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
        if len(pages.key_scales):
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


@compiled
def make_scratch(keys: Any, shape: Any) -> Any:
    """A thread's working memory."""
    rows, dim = shape.tile, shape.head_dim
    return Scratch(
        aligned_floats(rows * dim),
        aligned_floats(rows * dim),
        np.empty(rows, np.float32),
        aligned_floats(rows * LANES),
        aligned_floats(ROWS * SEGMENT),
        aligned_floats(ROWS * LANES),
        np.empty(dim * SEGMENT, keys.dtype),
        aligned_floats(SEGMENT),
        aligned_floats(SEGMENT),
    )


@compiled
def fetch_first(item: Any, pages: Any, tables: Any, shape: Any) -> None:
    """Asks for the first tokens of an item that is run soon."""
    end = min(item[FIRST] + SEGMENT, item[LAST])
    fetch(pages.keys, pages.values, tables[item[SEQUENCE]], item[KV_HEAD], item[FIRST], end, shape)


@compiled
def run_item(
    item: Any, query: Any, stride: int, scale: float, pages: Any, tables: Any, shape: Any, partial: Any, output: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Attends for one item, whose query rows are ``stride`` numbers apart."""
    start_item(item, query, stride, scale, shape, scratch)
    attend_item(item, pages, tables[item[SEQUENCE]], shape, scratch)
    if item[PARTIAL] == WHOLE:
        finish_item(item, output, shape, scratch)
    else:
        keep_partial(item, partial, shape, scratch)


def _build(digest: str, *, cache: bool) -> Any:
    """Makes the kernel. Captures ``digest`` so that Numba's cache of compiled code depends on it."""

    @njit(nogil=True, cache=cache, error_model="numpy", boundscheck=False)
    def paged_attention(  # type: ignore[no-untyped-def]
        thread,
        query,
        key,
        value,
        strides,
        pages,
        slots,
        tables,
        items,
        item_bounds,
        merges,
        scale,
        shape,
        partial,
        output,
        counters,
    ):
        """One thread's part of a layer's attention. All have to call it; ``counters`` are zeros at first."""
        digest  # noqa: B018
        count = len(item_bounds) - 1
        rounded = np.empty(shape.head_dim, pages.keys.dtype)
        for row in range(len(slots) * thread // count, len(slots) * (thread + 1) // count):
            write_token(key, row * strides[1], value, row * strides[2], slots[row], pages, shape, rounded)
        meetings = meet(counters, count, 0)
        scratch = make_scratch(pages.keys, shape)
        for i in range(item_bounds[thread], item_bounds[thread + 1]):
            if i + 1 < item_bounds[thread + 1]:
                fetch_first(items[i + 1], pages, tables, shape)
            run_item(items[i], query, strides[0], scale, pages, tables, shape, partial, output, scratch)
        if len(merges):
            meet(counters, count, meetings)
            for i in range(thread, len(merges), count):
                merge_partials(merges[i], partial, output, shape)

    return paged_attention


try:
    paged_attention = _build(SOURCE_DIGEST, cache=True)
except RuntimeError:
    # There is no folder that Numba may write to: every start compiles anew.
    paged_attention = _build(SOURCE_DIGEST, cache=False)
