"""How a step's attention is cut up: everything once, pieces that fit together, threads with about the same to do."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from chairlift.model.kernels.attention_items import PADDED, SEGMENT, WHOLE
from chairlift.model.kernels.work_plan import MIN_SPLIT, plan_work

TILE, GROUP, HEADS = 10, 3, 2


def plan(rows: list[int], lengths: list[int], window: int = 0, threads: int = 2) -> tuple[Any, Any, Any, int]:
    starts = np.cumsum([0, *rows]).astype(np.int32)
    made: tuple[Any, Any, Any, int] = plan_work(
        starts, np.array(lengths, np.int32), window, TILE, GROUP, HEADS, threads
    )
    return made


def ragged(seed: int) -> tuple[list[int], list[int]]:
    """Chunks of prompts among single tokens, of sequences short and long."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 2, 5, 30]))
    rows = np.where(rng.random(count) < 0.6, 1, rng.integers(1, 70, count))
    before = rng.integers(0, [4, 300, 5000][seed % 3], count)
    return rows.tolist(), (rows + before).tolist()


@pytest.mark.parametrize("window", [0, 21, 300])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_row_attends_to_all_that_it_sees_once(threads: int, window: int) -> None:
    for seed in range(12):
        rows, lengths = ragged(seed)
        starts = [0, *np.cumsum(rows).tolist()]
        items, bounds, merges, num_partials = plan(rows, lengths, window, threads)
        tiles: dict[tuple[int, int], list[int]] = defaultdict(list)
        seen: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        expected: dict[tuple[int, int], tuple[int, int]] = {}
        covered: list[tuple[int, int]] = []
        for sequence, row, num_rows, position, head, first, last, partial in items.tolist():
            assert 1 <= num_rows <= TILE
            assert starts[sequence] <= row <= starts[sequence + 1] - num_rows
            assert position == lengths[sequence] - (starts[sequence + 1] - row)
            if (row, head) not in tiles:
                covered += [(r, head) for r in range(row, row + num_rows)]
            tiles[row, head].append(partial)
            seen[row, head].append((first, last))
            oldest = max(0, position + 1 - window) if window else 0
            expected[row, head] = oldest // SEGMENT * SEGMENT, position + num_rows
        assert sorted(covered) == [(row, head) for row in range(starts[-1]) for head in range(HEADS)]
        for tile, pieces in seen.items():
            assert (pieces[0][0], pieces[-1][1]) == expected[tile]
            assert all(first < last and first % SEGMENT == 0 for first, last in pieces)
            assert all(one[1] == following[0] for one, following in pairwise(pieces))
        # Partial results have places of their own, and those of a tile lie side by side.
        cut = {tile: places for tile, places in tiles.items() if places != [WHOLE]}
        assert sorted(place for places in cut.values() for place in places) == list(range(num_partials))
        found = {(row, head): list(range(first, first + count)) for first, count, row, _, head in merges.tolist()}
        assert found == cut
        assert (bounds[0], bounds[-1]) == (0, len(items))
        assert (np.diff(bounds) >= 0).all()


def test_the_first_and_last_token_seen() -> None:
    items, _, _, _ = plan([3], [1000], window=100, threads=1)
    # Row 0 is at position 997 and sees 898 to 997; the tile's last row sees up to 999.
    assert items[:, 5:7].tolist() == [[898 // SEGMENT * SEGMENT, 1000]] * HEADS


def test_long_sequences_are_cut_where_threads_would_have_nothing_to_do() -> None:
    assert len(plan([1], [8 * MIN_SPLIT], threads=1)[0]) == HEADS
    assert len(plan([1], [2 * MIN_SPLIT - 1], threads=2)[0]) == HEADS
    assert len(plan([1], [8 * MIN_SPLIT], threads=2)[0]) == 4 * HEADS
    assert len(plan([1] * 40, [8 * MIN_SPLIT] * 40, threads=2)[0]) == 40 * HEADS


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_have_about_the_same_to_do(threads: int) -> None:
    for seed in range(12):
        items, bounds, _, _ = plan(*ragged(seed), threads=threads)
        costs = (items[:, 6] - items[:, 5]) * -(-items[:, 2] * GROUP // PADDED)
        for first, last in pairwise(bounds):
            assert costs[first:last].sum() <= costs.sum() / threads + costs.max()
