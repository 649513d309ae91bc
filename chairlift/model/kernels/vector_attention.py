"""Attention in vectors of float32: rows are taken four at a time, so that each key that is loaded serves four."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    head_of_block,
    place_of,
)
from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import for_threads
from chairlift.model.kernels.simd import LANES, broadcast, exp2, fma, keep_between, largest, load, maximum, splat, store

ROWS = PADDED


class VectorScratch(NamedTuple):
    """Working memory of all threads, or pointers to that of one, float32.

    ``query`` and ``output`` hold an item's rows, ``maxima`` and ``sums`` the state of their softmax (the sums in 16
    lanes). ``scores``, which become weights, are those of four rows and a segment; ``keys`` are a segment's, where
    blocks are shorter than a vector; ``key_scales`` and ``value_scales`` are its scales.
    """

    query: Any
    output: Any
    maxima: Any
    sums: Any
    scores: Any
    keys: Any
    key_scales: Any
    value_scales: Any


def vector_scratch(threads: int, tile: int, head_dim: int, cache_dtype: npt.DTypeLike) -> VectorScratch:
    """Working memory for so many threads."""
    return VectorScratch(
        query=for_threads(threads, tile * head_dim, np.float32),
        output=for_threads(threads, tile * head_dim, np.float32),
        maxima=for_threads(threads, tile, np.float32),
        sums=for_threads(threads, tile * LANES, np.float32),
        scores=for_threads(threads, ROWS * SEGMENT, np.float32),
        keys=for_threads(threads, head_dim * SEGMENT, cache_dtype),
        key_scales=for_threads(threads, SEGMENT, np.float32),
        value_scales=for_threads(threads, SEGMENT, np.float32),
    )


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
def _soften_row(scratch: Any, row: int, s: int, size: int, low: int, high: int, scaled: bool) -> Any:
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
        store(scores, s + i, weights)
    store(sums, row * LANES, running)
    return factor


@compiled
def _soften(scratch: Any, row: int, position: int, first: int, end: int, window: int, scaled: bool) -> Any:
    """Weighs the tokens [first, end) that a row at this position sees."""
    low = position + 1 - window - first if window else 0
    return _soften_row(scratch, row, row % ROWS * SEGMENT, end - first, low, min(position + 1, end) - first, scaled)


@compiled
def _accumulate(
    scratch: Any, factors: Any, o: int, pages: Any, table: Any, head: int, first: int, last: int, shape: Any
) -> None:  # fmt: skip
    """Multiplies four rows of the output with ``factors``, and adds the weighted values of tokens [first, last).

    It takes 32 columns at a time, or 16.
    """
    dim, shift, values = shape.head_dim, shape.block_shift, pages.values
    output, weights, zero = scratch.output, scratch.scores, splat(np.float32(0))
    f0, f1, f2, f3 = factors
    for d in range(0, dim, 2 * LANES):
        second = d + LANES if d + LANES < dim else d  # the same again, where there is only one
        o0, p0 = fma(load(output, o + d), f0, zero), fma(load(output, o + second), f0, zero)
        o1, p1 = fma(load(output, o + dim + d), f1, zero), fma(load(output, o + dim + second), f1, zero)
        o2, p2 = fma(load(output, o + 2 * dim + d), f2, zero), fma(load(output, o + 2 * dim + second), f2, zero)
        o3, p3 = fma(load(output, o + 3 * dim + d), f3, zero), fma(load(output, o + 3 * dim + second), f3, zero)
        token = first
        while token < last:
            end = min(last, ((token >> shift) + 1) << shift)
            v = place_of(pages, table, token, head, shape)
            for s in range(token - first, end - first):
                value, beside = load(values, v + d), load(values, v + second)
                w0, w1 = broadcast(weights, s), broadcast(weights, s + SEGMENT)
                w2, w3 = broadcast(weights, s + 2 * SEGMENT), broadcast(weights, s + 3 * SEGMENT)
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
def _key(pages: Any, table: Any, token: int, head: int, shape: Any) -> Any:
    """Where the keys of a token and those behind it in its block begin."""
    offset = token & ((1 << shape.block_shift) - 1)
    return head_of_block(table, token, head, shape) * pages.width + offset


@compiled
def _gather_keys(pages: Any, keys: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Copies the keys of tokens [first, last) to ``keys`` as [dim, SEGMENT], where blocks are shorter than a vector."""
    for token in range(first, last):
        k = _key(pages, table, token, head, shape)
        for d in range(shape.head_dim):
            keys[d * SEGMENT + token - first] = pages.keys[k + (d << shape.block_shift)]


@compiled
def attend_in_vectors(item: Any, pages: Any, table: Any, shape: Any, scratch: Any) -> None:
    """Attends with the rows in ``scratch.query`` to the item's tokens; leaves the state of the softmax in scratch."""
    keys, scaled = pages.keys, pages.scaled
    group = shape.num_heads // shape.num_kv_heads
    dim, shift, head = shape.head_dim, shape.block_shift, item[KV_HEAD]
    block_size = 1 << shift
    num_rows = item[NUM_ROWS] * group
    for first in range(item[FIRST], item[LAST], SEGMENT):
        last = min(first + SEGMENT, item[LAST])
        if last < item[LAST]:
            fetch(pages, table, head, last, min(last + SEGMENT, item[LAST]), shape)
        if scaled:
            gather_scales(pages, table, head, first, last, shape, scratch)
        if block_size < LANES:
            _gather_keys(pages, scratch.keys, table, head, first, last, shape)
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
                    k = _key(pages, table, token, head, shape)
                    if two:
                        other = _key(pages, table, token + LANES, head, shape)
                        _score_two(scratch.query, row * dim, dim, keys, k, other, block_size, scratch.scores, s)
                    else:
                        _score(scratch.query, row * dim, dim, keys, k, block_size, scratch.scores, s)
                token += 2 * LANES
            factors = (
                _soften(scratch, row, item[POSITION] + row // group, first, end, shape.window, scaled),
                _soften(scratch, row + 1, item[POSITION] + (row + 1) // group, first, end, shape.window, scaled),
                _soften(scratch, row + 2, item[POSITION] + (row + 2) // group, first, end, shape.window, scaled),
                _soften(scratch, row + 3, item[POSITION] + (row + 3) // group, first, end, shape.window, scaled),
            )
            _accumulate(scratch, factors, row * dim, pages, table, head, first, end, shape)
