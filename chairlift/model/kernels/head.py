"""The head of a decoder: logits of the rows that are sampled, and the best token of each as they are made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.model.kernels.by_kind import Packed, block_product, row_product
from chairlift.model.kernels.compiling import compiled
from chairlift.model.kernels.memory import as_words, part, pointer
from chairlift.model.kernels.pieces import claim_ahead, meet_fetching, piece_of, take
from chairlift.model.kernels.products import BLOCK_COLUMNS, BLOCK_ROWS
from chairlift.model.kernels.rows import normalize, write_row
from chairlift.model.kernels.simd import LANES, exceeds, load, store
from chairlift.model.kernels.threads import claim, meet

INFINITY = np.float32(np.inf)


class Head(NamedTuple):
    """What scores the next token, and for whom: rows ``rows`` of the residual stream, into as many rows of ``logits``.

    Those lie ``stride`` numbers apart; what fills the ``vocab_size`` numbers of each up to whole blocks is written too.
    They are written only where they are ``kept``: to write 64 of 49,152 numbers takes a third of the head's time.
    ``best`` [rows] int64 becomes the token of each row's largest logit, the lowest of those that tie; -1 where that
    logit is not finite or any is NaN. Each thread's own best so far are in its parts of ``peaks`` (float32) and
    ``tokens`` (int64).
    """

    packed: Any
    rows: Any
    logits: Any
    vocab_size: int
    stride: int
    kept: bool
    peaks: Any
    tokens: Any
    best: Any


@compiled
def _filled(columns):
    """As many columns as whole blocks have."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


@compiled
def _note_larger(numbers, first, count, column, peaks, tokens, row):
    """Looks for a logit larger than the largest of a row so far. NaN counts as larger than all, and as infinite."""
    for i in range(first, first + count):
        number = numbers[i]
        if number > peaks[row] or np.isnan(number):
            peaks[row] = INFINITY if np.isnan(number) else number
            tokens[row] = column + i - first


@compiled
def _score_units(kind, a, num_rows, width, packed, head, peaks, tokens, scales, numbers, counters, stage):
    """A thread's share of the logits, and the largest of each row among them."""
    logits, stride, vocab_size = pointer(head.logits, 0), head.stride, head.vocab_size
    unit = claim(counters, stage)
    while unit * BLOCK_COLUMNS < vocab_size:
        column = unit * BLOCK_COLUMNS
        for first in range(0, num_rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, num_rows - first)
            block_product(kind, a, packed, scales, unit, first, count, width, numbers)
            for r in range(count):
                row, start = first + r, r * BLOCK_COLUMNS
                low, high = load(numbers, start), load(numbers, start + LANES)
                if head.kept:
                    store(logits, row * stride + column, low)
                    store(logits, row * stride + column + LANES, high)
                if exceeds(low, peaks[row]) or exceeds(high, peaks[row]):
                    # What fills the last block up is no token.
                    _note_larger(numbers, start, min(BLOCK_COLUMNS, vocab_size - column), column, peaks, tokens, row)
        unit = claim(counters, stage)


@compiled
def _choose_best(head, threads):
    """Of the best of all threads the best."""
    peaks, tokens, best = head.peaks, head.tokens, head.best
    for row in range(len(head.rows)):
        peak, token = -INFINITY, -1
        for thread in range(threads):
            other, candidate = part(peaks, thread, threads)[row], part(tokens, thread, threads)[row]
            if other > peak or (other == peak and candidate < token):
                peak, token = other, candidate
        best[row] = token if peak < INFINITY else -1


@compiled
def _score_row(kind, a, width, packed, head, peaks, tokens, scales, numbers, counters, stage, threads, ahead):
    """The same for a single row, whose first piece is claimed."""
    logits, strips = pointer(head.logits, 0), _filled(head.vocab_size) // LANES
    first, last = take(ahead)
    while first < last:
        following, end_of_following = piece_of(claim(counters, stage), strips, threads)
        row_product(kind, a, packed, scales, first, last - first, following, width, numbers)
        for i in range(0, (last - first) * LANES, LANES):
            lanes, column = load(numbers, i), first * LANES + i
            if head.kept:
                store(logits, column, lanes)
            if exceeds(lanes, peaks[0]):
                _note_larger(numbers, i, min(LANES, head.vocab_size - column), column, peaks, tokens, 0)
        first, last = following, end_of_following


@compiled
def score(thread, kind, sizes, eps, weight, head, buffers, counters, stage, meetings):
    """Final norm and head of the rows that are asked for."""
    num_rows, hidden, threads = len(head.rows), sizes.hidden, sizes.threads
    x, activations, scales = buffers.x, buffers.activations, buffers.scales
    row, numbers, ahead = buffers.row, buffers.numbers, buffers.ahead
    words, column_scales, offsets, _, _ = head.packed
    packed = Packed(pointer(words, 0), pointer(column_scales, 0), pointer(offsets, 0), 0, 0)
    if num_rows == 1:
        words_of_row = hidden // kind.per_word
        claim_ahead(0, _filled(head.vocab_size), words_of_row, threads, counters, stage, ahead)
    for r in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
        normalize(x, head.rows[r] * hidden, weight, 0, hidden, eps, row, 0)
        write_row(kind, row, 0, hidden, activations, r * hidden, scales, r)
    peaks, tokens = part(head.peaks, thread, threads), part(head.tokens, thread, threads)
    for r in range(num_rows):
        peaks[r] = -INFINITY
    meetings = meet_fetching(counters, threads, meetings, packed.words, ahead)
    a = as_words(activations)
    if num_rows == 1:
        _score_row(
            kind, a, hidden, packed, head, peaks, tokens, scales, numbers, counters, stage, threads, ahead
        )  # fmt: skip
    else:
        _score_units(kind, a, num_rows, hidden, packed, head, peaks, tokens, scales, numbers, counters, stage)
    meet(counters, threads, meetings)
    if thread == 0:
        _choose_best(head, threads)
