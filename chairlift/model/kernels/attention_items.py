"""What all ways to attend have in common: items of work, pages, and the softmax.

The work is cut into items: a tile of query rows of one sequence, the query heads that share one key/value head, and a
range of the sequence's tokens. Within an item the tokens pass by in segments small enough to stay in the first-level
cache. Where a tile's tokens are cut into several items, the partial results are merged afterwards (Dao et al.,
"Flash-Decoding", 2023; the softmax is that of Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018).

Scores are kept in units of log2, so that 2^x serves as the exponential.
"""

# ruff: noqa: ARG001 -- the variants of an operation take the same arguments, whichever they need.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled
from chairlift.model.kernels.kinds import in_tiles
from chairlift.model.kernels.memory import CACHE_LINE, WORD_BYTES, as_floats, pointer
from chairlift.model.kernels.rows import int8_scale
from chairlift.model.kernels.simd import (
    LANES,
    fma,
    load,
    prefetch,
    splat,
    store,
    store_in_turns,
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

    ``kind`` says how to attend: in vectors of float32, or in tiles of bfloat16 and int8. ``block_shift``
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


class LayerPages(NamedTuple):
    """Pointers to one layer's pages.

    They are as :class:`~chairlift.model.attention.base.LayerKVs` says, and :func:`lies_in_tiles`. What belongs to a
    block and a head takes ``width`` numbers of ``itemsize`` bytes; the scales of int8, which alone is ``scaled``, are
    float32. So the keys and the values of the ``head_of_block`` each begin ``width`` times its number behind the
    pointers, and its scales at :func:`scales_of`.
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    width: int
    scaled: bool
    itemsize: int


@compiled
def pages_of_layer(pages: Any, layer: int, num_layers: int, shape: Any) -> Any:
    """One layer's part of the pages of so many, which lie end to end."""
    first, half, scaled = len(pages) // num_layers * layer, shape.head_dim << shape.block_shift, pages.itemsize == 1
    scales = as_floats(pointer(pages, first + 2 * half))
    return LayerPages(
        pointer(pages, first),
        pointer(pages, first + half),
        scales,
        pointer(scales, 1 << shape.block_shift),
        2 * half + (2 * WORD_BYTES << shape.block_shift if scaled else 0),
        scaled,
        pages.itemsize,
    )


@compiled
def head_of_block(table: Any, token: int, head: int, shape: Any) -> Any:
    """The number of a token's block and a head."""
    return np.int64(table[token >> shape.block_shift]) * shape.num_kv_heads + head


@compiled
def place_of(pages: Any, table: Any, token: int, head: int, shape: Any) -> Any:
    """Where the numbers of a token begin, in rows of as many as a head has: values, and keys if tiles take them."""
    offset = token & ((1 << shape.block_shift) - 1)
    return head_of_block(table, token, head, shape) * pages.width + offset * shape.head_dim


@compiled
def scales_of(place: int, pages: Any) -> Any:
    """Where the scales begin of a :func:`head_of_block`."""
    return place * (pages.width // WORD_BYTES)


def lies_in_tiles(kind: Any) -> bool:  # pragma: no cover
    """Whether the cache lies as tiles take it: a token's keys side by side, and values of as many tokens as make a word
    of four bytes in turns. Else the tokens' keys lie side by side, and a token's values."""
    raise TypeError(COMPILED_ONLY)


@overload(lies_in_tiles)
def _lies_in_tiles(kind):  # type: ignore[no-untyped-def]
    answer = in_tiles(kind)

    def lies(kind):  # type: ignore[no-untyped-def]
        return answer

    return lies


@compiled
def gather_scales(pages: Any, table: Any, head: int, first: int, last: int, shape: Any, scratch: Any) -> None:
    """Copies the scales of tokens [first, last) side by side, and fills their places up with zeros."""
    for token in range(last - first, SEGMENT):
        scratch.key_scales[token] = 0
        scratch.value_scales[token] = 0
    shift = shape.block_shift
    for token in range(first, last):
        place = scales_of(head_of_block(table, token, head, shape), pages) + (token & ((1 << shift) - 1))
        scratch.key_scales[token - first] = pages.key_scales[place]
        scratch.value_scales[token - first] = pages.value_scales[place]


@compiled
def fetch(pages: Any, table: Any, head: int, first: int, last: int, shape: Any) -> None:
    """Asks for the blocks of tokens [first, last), which lie too far apart for the processor to foresee."""
    size = shape.head_dim << shape.block_shift
    for token in range(first >> shape.block_shift << shape.block_shift, last, 1 << shape.block_shift):
        block = head_of_block(table, token, head, shape) * pages.width
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


def _write_head(
    kind: Any, key: Any, k: Any, key_factor: Any, value: Any, v: Any, value_factor: Any, pages: Any, target: Any,
    offset: Any, shape: Any, rounded: Any,
) -> None:  # fmt: skip  # pragma: no cover
    """Puts a head's keys and values into the block that begins at ``target``."""
    raise TypeError(COMPILED_ONLY)


@overload(_write_head)
def _write_head_by_kind(kind, key, k, key_factor, value, v, value_factor, pages, target, offset, shape, rounded):  # type: ignore[no-untyped-def]
    def as_tiles_take_it(kind, key, k, key_factor, value, v, value_factor, pages, target, offset, shape, rounded):  # type: ignore[no-untyped-def]
        dim, turns, zero = shape.head_dim, WORD_BYTES // pages.itemsize, splat(np.float32(0))
        for d in range(0, dim, LANES):
            store(pages.keys, target + offset * dim + d, fma(load(key, k + d), key_factor, zero))
            words = target + (offset // turns * dim + d) * turns
            store_in_turns(pages.values, words, offset % turns, fma(load(value, v + d), value_factor, zero))

    def as_vectors_take_it(kind, key, k, key_factor, value, v, value_factor, pages, target, offset, shape, rounded):  # type: ignore[no-untyped-def]
        dim, zero = shape.head_dim, splat(np.float32(0))
        for d in range(0, dim, LANES):
            store(rounded, d, fma(load(key, k + d), key_factor, zero))
            store(pages.values, target + offset * dim + d, fma(load(value, v + d), value_factor, zero))
        for d in range(dim):
            pages.keys[target + (d << shape.block_shift) + offset] = rounded[d]

    return as_tiles_take_it if in_tiles(kind) else as_vectors_take_it


@compiled
def write_token(key: Any, k: int, value: Any, v: int, slot: int, pages: Any, shape: Any, rounded: Any) -> None:
    """Puts one token's keys and values, which begin at ``key[k]`` and ``value[v]``, into their slot.

    ``rounded`` has room for a head of keys, for where they lie as far apart in the cache as a block is long.
    """
    dim, block_size = shape.head_dim, 1 << shape.block_shift
    block, offset = slot >> shape.block_shift, slot & (block_size - 1)
    key_factor, value_factor = splat(np.float32(1)), splat(np.float32(1))
    for head in range(shape.num_kv_heads):
        place = block * shape.num_kv_heads + head
        if pages.scaled:
            key_scale, value_scale = int8_scale(key, k, dim), int8_scale(value, v, dim)
            pages.key_scales[scales_of(place, pages) + offset] = key_scale
            pages.value_scales[scales_of(place, pages) + offset] = value_scale
            key_factor, value_factor = splat(np.float32(1) / key_scale), splat(np.float32(1) / value_scale)
        _write_head(
            shape.kind, key, k, key_factor, value, v, value_factor, pages, place * pages.width, offset, shape, rounded
        )  # fmt: skip
        k, v = k + dim, v + dim
