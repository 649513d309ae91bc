"""How the weights that a single row meets are cut, claimed before they are needed, and fetched meanwhile.

A product of one row waits for its weights alone, and which they are depends on nothing. So a thread claims its first
piece of the next product before it waits for the others, and fetches that into its second-level cache while it waits:
memory would have nothing to do then.
"""

from __future__ import annotations

from typing import Any

from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.products import ROW_STRIPS
from chairlift.model.kernels.simd import LANES, prefetch
from chairlift.model.kernels.threads import all_here, arrive, await_all, claim

FIRST, LAST, WORD, WORDS, LINE = range(5)
"""Of what a thread has claimed ahead: its first strip and the one behind its last, its first word, the words of a strip
and how many lines of each strip have been asked for."""
AHEAD = 5


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


@compiled
def claim_ahead(first_word: int, columns: int, words: int, threads: int, counters: Any, stage: int, ahead: Any) -> None:
    """Claims a thread's first piece of a product whose weights [columns, words of K] begin at ``first_word``."""
    first, last = piece_of(claim(counters, stage), columns // LANES, threads)
    ahead[FIRST], ahead[LAST] = first, last
    ahead[WORD], ahead[WORDS], ahead[LINE] = first_word + first * words * LANES, words, 0


@compiled
def take(ahead: Any) -> Any:
    """The piece that a thread has claimed ahead, from its first strip to the one behind its last."""
    ahead[WORDS] = 0  # what is not fetched by now is read
    return ahead[FIRST], ahead[LAST]


@compiled
def fetch_ahead(weights: Any, ahead: Any) -> bool:
    """Asks for the next line of each strip that is claimed ahead. Returns whether there was one."""
    words, line = ahead[WORDS], ahead[LINE]
    if line >= words:
        return False
    for strip in range(ahead[LAST] - ahead[FIRST]):
        prefetch(weights, ahead[WORD] + (strip * words + line) * LANES)
    ahead[LINE] = line + 1
    return True


@compiled
def meet_fetching(counters: Any, threads: int, times: int, weights: Any, ahead: Any) -> int:
    """Meets the others, see :func:`~chairlift.model.kernels.threads.meet`, and fetches what is claimed meanwhile."""
    times += 1
    everybody = threads * times
    if threads > 1 and not arrive(counters, everybody):
        while not all_here(counters, everybody):
            if not fetch_ahead(weights, ahead):
                await_all(counters, everybody)
    return times
