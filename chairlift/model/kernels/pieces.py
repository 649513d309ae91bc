"""How the strips of a projection are cut for a single row."""

from __future__ import annotations

from typing import Any

from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.products import ROW_STRIPS


@compiled
def piece_of(piece: int, strips: int, threads: int) -> Any:
    """The first strip of a piece and the one behind its last, both ``strips`` where there is no such piece.

    All threads get as many pieces of eight, then of the rest as many of four, and the last ones have two each: a large
    piece keeps more of memory busy, but the others wait for whoever takes one alone.
    """
    first, size = 0, ROW_STRIPS
    while size > 2:
        count = (strips - first) // (size * threads) * threads
        if piece < count:
            return first + piece * size, first + piece * size + size
        piece -= count
        first += count * size
        size //= 2
    first = min(first + 2 * piece, strips)
    return first, min(first + 2, strips)
