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
    PADDED,
    PARTIAL,
    SEGMENT,
    SEQUENCE,
    WHOLE,
    Shape,
    fetch,
    finish_item,
    keep_partial,
    merge_partials,
    pages_of_layer,
    start_item,
    write_token,
)
from chairlift.model.kernels.by_kind import begin, end
from chairlift.model.kernels.cache_tiles import configurations
from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled, kernel
from chairlift.model.kernels.few_row_attention import (
    FEW_ROWS,
    attend_with_few_rows,
    few_row_scratch,
)
from chairlift.model.kernels.kinds import in_tiles
from chairlift.model.kernels.memory import aligned, for_threads, own_parts, part, pointer
from chairlift.model.kernels.threads import meet
from chairlift.model.kernels.tile_attention import attend_in_tiles, tile_scratch
from chairlift.model.kernels.vector_attention import attend_in_vectors, vector_scratch


class Scratches(NamedTuple):
    """Working memory for each way to attend, and room for a head's keys in the cache's type.

    ``configurations`` of tiles are that for all products, and those for four query rows, for eight and so on; which
    of them a thread's tiles have is ``configured``.
    """

    vectors: Any
    tiles: Any
    few_rows: Any
    rounded: Any
    configurations: Any
    configured: Any


def make_scratch(shape: Shape, threads: int, cache_dtype: npt.DTypeLike) -> Scratches:
    """Working memory for so many threads, and a cache of this type."""
    sizes = threads, shape.tile, shape.head_dim
    rounded = for_threads(threads, shape.head_dim, cache_dtype)
    few_rows = few_row_scratch(threads, shape.head_dim, cache_dtype)
    configs = aligned((1 + FEW_ROWS // PADDED) * tiles.CONFIG_BYTES, np.uint8)
    configs[: tiles.CONFIG_BYTES] = tiles.full_tiles()
    configs[tiles.CONFIG_BYTES :] = configurations(FEW_ROWS, np.dtype(cache_dtype).itemsize)
    configured = for_threads(threads, 1, np.int64)
    return Scratches(vector_scratch(*sizes, cache_dtype), tile_scratch(*sizes), few_rows, rounded, configs, configured)


@compiled
def own_scratches(scratch: Any, thread: int, threads: int) -> Any:
    """A thread's working memory. Its tiles are configured for all products."""
    configured = part(scratch.configured, thread, threads)
    configured[0] = 0
    return Scratches(
        own_parts(scratch.vectors, thread, threads),
        own_parts(scratch.tiles, thread, threads),
        own_parts(scratch.few_rows, thread, threads),
        part(scratch.rounded, thread, threads),
        pointer(scratch.configurations, 0),
        configured,
    )


@compiled
def _configure(scratch: Any, number: int) -> None:
    """Takes a configuration of tiles, which is slow, if it is another than before."""
    if scratch.configured[0] != number:
        tiles.configure(pointer(scratch.configurations, number * tiles.CONFIG_BYTES))
        scratch.configured[0] = number


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
    num_rows = item[NUM_ROWS] * (shape.num_heads // shape.num_kv_heads)
    if num_rows <= FEW_ROWS:
        _configure(scratch, -(-num_rows // PADDED))
        _run_few_rows(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch.few_rows)
        return
    _configure(scratch, 0)
    _fetch_first(following, pages, tables, shape)
    start_item(item, query, stride, scale, shape, scratch.tiles)
    attend_in_tiles(item, pages, _table(tables, item), shape, scratch.tiles)
    _end_item(item, partial, output, shape, scratch.tiles)


@compiled
def _run_few_rows(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    start_item(item, query, stride, scale, shape, scratch)
    attend_with_few_rows(item, pages, _table(tables, item), following, _table(tables, following), shape, scratch)
    _end_item(item, partial, output, shape, scratch)


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


def _end_items(kind: Any, scratch: Any) -> None:  # pragma: no cover
    raise TypeError(COMPILED_ONLY)


@compiled
def run_item(item, following, query, stride, scale, pages, tables, shape, partial, output, scratch):  # type: ignore[no-untyped-def]
    """Attends for one item, whose query rows are ``stride`` numbers apart.

    It asks for the first tokens of the one that is run next, which may be this one again.
    """
    _run(shape.kind, item, following, query, stride, scale, pages, tables, shape, partial, output, scratch)


@overload(_end_items)
def _end_items_by_kind(kind, scratch):  # type: ignore[no-untyped-def]
    def configure(kind, scratch):  # type: ignore[no-untyped-def]
        _configure(scratch, 0)

    def nothing(kind, scratch):  # type: ignore[no-untyped-def]
        pass

    return configure if in_tiles(kind) else nothing


@compiled
def end_items(kind: Any, scratch: Any) -> None:
    """Has a thread's tiles configured for all products again."""
    _end_items(kind, scratch)


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
    layer, own = pages_of_layer(pages, 0, 1, shape), own_scratches(scratch, thread, count)
    for row in range(len(slots) * thread // count, len(slots) * (thread + 1) // count):
        write_token(key, row * strides[1], value, row * strides[2], slots[row], layer, shape, own.rounded)
    meetings = meet(counters, count, 0)
    for i in range(item_bounds[thread], item_bounds[thread + 1]):
        following = min(i + 1, item_bounds[thread + 1] - 1)
        run_item(
            pointer(items, i * ITEM), pointer(items, following * ITEM), query, strides[0], scale, layer, tables,
            shape, partial, output, own,
        )  # fmt: skip
    end_items(shape.kind, own)
    if len(merges):
        meet(counters, count, meetings)
        for i in range(thread, len(merges), count):
            merge_partials(merges[i], partial, output, shape)
    end(shape.kind, kept)
