"""Paged attention for the CPU: an online softmax that walks the block table in place, in one of three ways."""

# ruff: noqa: ARG001 -- the variants of an operation take the same arguments, whichever they need.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import overload

from chairlift.model.kernels import tiles
from chairlift.model.kernels.attention_items import (
    FIRST,
    ITEM,
    KV_HEAD,
    LAST,
    NUM_ROWS,
    PARTIAL,
    SEGMENT,
    SEQUENCE,
    WHOLE,
    Shape,
    fetch,
    finish_item,
    keep_partial,
    merge_partials,
    own_scratch,
    pages_of_layer,
    start_item,
    write_token,
)
from chairlift.model.kernels.by_kind import begin, end
from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled, kernel
from chairlift.model.kernels.dot_attention import FEW_ROWS, attend_in_dots, dot_scratch, own_dot_scratch
from chairlift.model.kernels.dots import CHUNK, WIDEST
from chairlift.model.kernels.kinds import in_tiles
from chairlift.model.kernels.memory import for_threads, part, pointer
from chairlift.model.kernels.threads import meet
from chairlift.model.kernels.tile_attention import attend_in_tiles, tile_scratch
from chairlift.model.kernels.vector_attention import attend_in_vectors, vector_scratch


class Scratches(NamedTuple):
    """Working memory for each way to attend, and room for a head's keys in the cache's type."""

    vectors: Any
    tiles: Any
    dots: Any
    rounded: Any


def make_scratch(shape: Shape, threads: int, cache_dtype: npt.DTypeLike) -> Scratches:
    """Working memory for so many threads, and a cache of this type."""
    sizes = threads, shape.tile, shape.head_dim
    rounded = for_threads(threads, shape.head_dim, cache_dtype)
    dots = dot_scratch(threads, shape.head_dim, cache_dtype)
    return Scratches(vector_scratch(*sizes, cache_dtype), tile_scratch(*sizes), dots, rounded)


@compiled
def own_scratches(scratch: Any, thread: int, threads: int) -> Any:
    """A thread's working memory."""
    return Scratches(
        own_scratch(scratch.vectors, thread, threads),
        own_scratch(scratch.tiles, thread, threads),
        own_dot_scratch(scratch.dots, thread, threads),
        part(scratch.rounded, thread, threads),
    )


@compiled
def _table(tables: Any, item: Any) -> Any:
    """The block table of an item's sequence."""
    return pointer(tables, item[SEQUENCE] * tables.shape[1])


@compiled
def _end_item(item: Any, partial: Any, output: Any, shape: Any, scratch: Any) -> None:
    if item[PARTIAL] == WHOLE:
        finish_item(item, output, shape, scratch)
    else:
        keep_partial(item, partial, shape, scratch)


@compiled
def _fetch_first(item: Any, pages: Any, tables: Any, shape: Any) -> None:
    """Asks for the first tokens of an item that is run next."""
    end = min(item[FIRST] + SEGMENT, item[LAST])
    fetch(pages, _table(tables, item), item[KV_HEAD], item[FIRST], end, shape)


@compiled
def _run_in_vectors(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    _fetch_first(following, pages, tables, shape)
    start_item(item, query, stride, scale, shape, scratch.vectors)
    attend_in_vectors(item, pages, _table(tables, item), shape, scratch.vectors)
    _end_item(item, partial, output, shape, scratch.vectors)


@compiled
def _run_in_tiles(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    if item[NUM_ROWS] * (shape.num_heads // shape.num_kv_heads) <= FEW_ROWS:
        if shape.head_dim % CHUNK == 0 and shape.head_dim <= WIDEST:
            _run_in_dots(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch)
        else:
            _run_in_vectors(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch)
        return
    _fetch_first(following, pages, tables, shape)
    start_item(item, query, stride, scale, shape, scratch.tiles)
    attend_in_tiles(item, pages, _table(tables, item), shape, scratch.tiles)
    _end_item(item, partial, output, shape, scratch.tiles)


@compiled
def _run_in_dots(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    start_item(item, query, stride, scale, shape, scratch.dots)
    attend_in_dots(item, pages, _table(tables, item), following, _table(tables, following), shape, scratch.dots)
    _end_item(item, partial, output, shape, scratch.dots)


def _run(
    kind: Any, item: Any, following: Any, query: Any, stride: Any, scale: Any, pages: Any, tables: Any, shape: Any,
    partial: Any, output: Any, scratch: Any,
) -> None:  # fmt: skip  # pragma: no cover
    raise TypeError(COMPILED_ONLY)


@overload(_run)
def _run_by_kind(kind, item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    way = _run_in_tiles if in_tiles(kind) else _run_in_vectors

    def run(kind, item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
        way(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch)

    return run


@compiled
def run_item(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    """Attends for one item, whose query rows are ``stride`` numbers apart.

    It asks for the first tokens of the one that is run next, which may be this one again.
    """
    _run(shape.kind, item, following, query, stride, scale, pages, tables, shape, partial, output, scratch)


@kernel
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
    scratch,
    output,
    counters,
    config,
):
    """One thread's part of a layer's attention. All have to call it; ``counters`` are zeros at first.

    ``config`` is :func:`tiles.full_tiles`.
    """
    count = len(item_bounds) - 1
    kept = np.empty(tiles.CONFIG_BYTES, np.uint8)
    begin(shape.kind, config, kept)
    layer, own = pages_of_layer(pages, 0, 1), own_scratches(scratch, thread, count)
    for row in range(len(slots) * thread // count, len(slots) * (thread + 1) // count):
        write_token(key, row * strides[1], value, row * strides[2], slots[row], layer, shape, own.rounded)
    meetings = meet(counters, count, 0)
    for i in range(item_bounds[thread], item_bounds[thread + 1]):
        following = min(i + 1, item_bounds[thread + 1] - 1)
        run_item(
            pointer(items, i * ITEM), pointer(items, following * ITEM), query, strides[0], scale, layer, tables,
            shape, partial, output, own,
        )  # fmt: skip
    if len(merges):
        meet(counters, count, meetings)
        for i in range(thread, len(merges), count):
            merge_partials(merges[i], partial, output, shape)
    end(shape.kind, kept)
