"""How the attention of a step is cut into items: tiles of query rows, and pieces of what they attend to.

Made anew for each step. The same with arrays takes some twenty calls of NumPy, which cost a step of one sequence a
thirtieth of its time.
"""

from __future__ import annotations

import numpy as np

from chairlift.model.kernels.attention_items import ITEM, PADDED, SEGMENT, WHOLE
from chairlift.model.kernels.compiling import compiled, kernel

# Below this many tokens, cutting a sequence in two costs more than it gains.
MIN_SPLIT = 4 * SEGMENT
# Items to aim for per thread, where sequences are cut to keep all threads busy.
ITEMS_PER_THREAD = 4
# Columns of a tile: the first four of an item, then the first token attended to, how many pieces, and tokens in each.
_SEQUENCE, _ROW, _NUM_ROWS, _POSITION, _FIRST, _PIECES, _LENGTH = range(7)


@compiled
def _tiles(query_start, seq_lens, window, tile_tokens):
    """The rows of each sequence in tiles, not cut yet."""
    count = 0
    for sequence in range(len(seq_lens)):
        count += -(-(query_start[sequence + 1] - query_start[sequence]) // tile_tokens)
    tiles, made = np.empty((count, 7), np.int64), 0
    for sequence in range(len(seq_lens)):
        start, end = query_start[sequence], query_start[sequence + 1]
        for row in range(start, end, tile_tokens):
            position = seq_lens[sequence] - end + row
            tile = tiles[made]
            tile[_SEQUENCE], tile[_ROW], tile[_POSITION] = sequence, row, position
            tile[_NUM_ROWS] = min(tile_tokens, end - row)
            # The kernel loads vectors of tokens, so pieces begin on a segment's bound.
            tile[_FIRST] = max(position + 1 - window, 0) // SEGMENT * SEGMENT if window else 0
            made += 1
    return tiles


@compiled
def _span(tile):
    """Tokens that a tile attends to."""
    return tile[_POSITION] + tile[_NUM_ROWS] - tile[_FIRST]


@compiled
def _cost(tile, group):
    """What a tile costs for each of those."""
    return -(-tile[_NUM_ROWS] * group // PADDED)


@compiled
def _cut(tiles, group, num_kv_heads, threads):
    """Cuts long ones, so that all threads are busy; returns how many pieces there are and how many tiles are cut."""
    total, items, cut = 0, 0, 0
    for tile in tiles:
        total += _span(tile) * _cost(tile, group)
    share = max(1, total * num_kv_heads // (threads * ITEMS_PER_THREAD))
    for tile in tiles:
        span, pieces = _span(tile), 1
        if threads > 1:
            pieces = min(-(-span * _cost(tile, group) // share), max(1, span // MIN_SPLIT))
        tile[_LENGTH] = -(-span // (pieces * SEGMENT)) * SEGMENT
        tile[_PIECES] = -(-span // tile[_LENGTH])
        items += tile[_PIECES]
        cut += tile[_PIECES] > 1
    return items, cut


@compiled
def _deal(costs, threads):
    """Bounds of each thread's run of items, so that the runs cost about the same."""
    bounds, middle = np.zeros(threads + 1, np.int64), np.cumsum(costs) - costs / 2
    for thread in range(1, threads):
        bounds[thread] = np.searchsorted(middle, middle[-1] * thread / threads)
    bounds[threads] = len(costs)
    return bounds


@kernel
def plan_work(query_start, seq_lens, window, tile_tokens, group, num_kv_heads, threads):
    """Items [N, 8] int32, bounds [threads + 1] int64 of each thread's, merges [M, 5] int32, number of partials.

    ``tile_tokens`` rows make a tile at most, each of ``group`` heads that share a key/value head.
    """
    tiles = _tiles(query_start, seq_lens, window, tile_tokens)
    num_items, num_cut = _cut(tiles, group, num_kv_heads, threads)
    items, costs = np.empty((num_items * num_kv_heads, ITEM), np.int32), np.empty(num_items * num_kv_heads)
    merges = np.empty((num_cut * num_kv_heads, 5), np.int32)
    item = merge = partials = 0
    for tile in tiles:
        end, pieces = tile[_POSITION] + tile[_NUM_ROWS], tile[_PIECES]
        for piece in range(pieces):
            first = tile[_FIRST] + piece * tile[_LENGTH]
            last = min(first + tile[_LENGTH], end)
            for head in range(num_kv_heads):
                items[item, :4] = tile[:4]
                items[item, 4], items[item, 5], items[item, 6] = head, first, last
                items[item, 7] = partials + head * pieces + piece if pieces > 1 else WHOLE
                costs[item] = (last - first) * _cost(tile, group)
                item += 1
        if pieces > 1:
            for head in range(num_kv_heads):
                merges[merge, 0], merges[merge, 1] = partials + head * pieces, pieces
                merges[merge, 2], merges[merge, 3], merges[merge, 4] = tile[_ROW], tile[_NUM_ROWS], head
                merge += 1
            partials += pieces * num_kv_heads
    return items, _deal(costs, threads), merges, partials
