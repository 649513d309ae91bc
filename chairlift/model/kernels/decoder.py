"""A whole step of a decoder in one kernel.

Between its first and its last line no thread comes back to Python: with thirty layers and eight stages in each, what a
call costs would be more than what it computes. All threads run the same program, claim pieces of each stage, and meet
where the next stage needs what others made::

    norm | qkv | rotate, write keys and values | attention | output + residual |
    norm | gate and up, SwiGLU | down + residual

and behind the last layer, of the rows that are sampled::

    norm | head

The residual stream is float32 whatever the weights are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chairlift.model.kernels import tiles
from chairlift.model.kernels.attention_items import (
    ITEM,
    Shape,
    lies_in_tiles,
    merge_partials,
    pages_of_layer,
    write_token,
)
from chairlift.model.kernels.by_kind import Packed, begin, block_product, end, quantize_rows, row_product, words_of
from chairlift.model.kernels.compiling import compiled, kernel
from chairlift.model.kernels.head import score
from chairlift.model.kernels.memory import WORD_BYTES, as_words, part, pointer
from chairlift.model.kernels.paged_attention import end_items, own_scratches, run_item
from chairlift.model.kernels.pieces import WORDS, claim_ahead, meet_fetching, piece_of, take
from chairlift.model.kernels.products import BLOCK_COLUMNS, BLOCK_ROWS
from chairlift.model.kernels.rows import embed, gated, normalize, rotate, write_row
from chairlift.model.kernels.simd import LANES, fma, load, prefetch, splat, store
from chairlift.model.kernels.threads import claim, meet, ticks

QKV, ATTENTION, MERGES, OUTPUT, GATE_UP, DOWN = range(6)
STAGES_PER_LAYER = 6
"""Stages whose pieces are claimed."""
STAGES = ("norm", "qkv", "rotate", "attention", "output", "gate_up", "down", "quantize", "head")
"""What a step's time goes to; waiting for the slower threads of a stage belongs to it."""
NORM, T_QKV, ROTATE, T_ATTENTION, T_OUTPUT, T_GATE_UP, T_DOWN, QUANTIZE, T_HEAD = range(len(STAGES))


class Sizes(NamedTuple):
    """Widths of the model, as in :class:`~chairlift.model.config.ModelConfig`; ``qkv`` is filled up to whole blocks.

    ``attention`` is the kind of :class:`~chairlift.model.kernels.attention_items.Shape`.
    """

    attention: Any
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: int
    block_shift: int
    tile: int
    threads: int


class Weights(NamedTuple):
    """All weights but the head's.

    The packed ones lie in the order in which a step reads them: of each layer qkv, output, gate and up (a strip of the
    gate beside the strip of the same columns of up), down. For int8, ``scales`` (float32) and ``offsets`` (int32, what
    unsigned activations add to its sums) hold each column's, in the same order; else they are empty. Norms and biases
    are float32, [layers × width], empty where the model has none.
    """

    embedding: Any
    words: Any
    scales: Any
    offsets: Any
    qkv_bias: Any
    attention_norm: Any
    mlp_norm: Any
    final_norm: Any
    q_norm: Any
    k_norm: Any


class Buffers(NamedTuple):
    """What is on its way, [rows, width] each, rows filled up to whole blocks.

    ``x`` (the residual stream) and ``qkv`` are float32. ``activations`` is what a product takes, with ``scales`` for
    each row for int8. ``attended`` and ``inner`` are what a product takes too; for int8 they are float32 and become
    ``activations`` first. Of ``row``, ``numbers`` (a block of a product) and ``ahead`` (what of the next product is
    claimed, see :mod:`~chairlift.model.kernels.pieces`) each thread has its own.
    """

    x: Any
    qkv: Any
    attended: Any
    inner: Any
    activations: Any
    scales: Any
    row: Any
    numbers: Any
    ahead: Any


class Step(NamedTuple):
    """The rows of a step, and the work plan of its attention.

    ``cos`` and ``sin`` are tables of all positions, [positions, head_dim / 2].

    ``items`` and ``merges`` of all windows lie end to end; layer l has those from ``item_bounds[plans[l]]`` to
    ``item_bounds[plans[l] + 1]``, and the window ``windows[l]``.
    """

    token_ids: Any
    positions: Any
    cos: Any
    sin: Any
    slots: Any
    tables: Any
    items: Any
    item_bounds: Any
    merges: Any
    merge_bounds: Any
    plans: Any
    windows: Any
    partial: Any


@compiled
def _own_buffers(buffers, thread, threads):
    """Pointers to the rows of all, and to what is a thread's own."""
    return Buffers(
        pointer(buffers.x, 0), pointer(buffers.qkv, 0), pointer(buffers.attended, 0), pointer(buffers.inner, 0),
        pointer(buffers.activations, 0), pointer(buffers.scales, 0), part(buffers.row, thread, threads),
        part(buffers.numbers, thread, threads), part(buffers.ahead, thread, threads),
    )  # fmt: skip


@compiled
def _product_of_row(kind, a, width, packed, c, columns, add, scales, numbers, counters, stage, threads, ahead):
    """The same for a single row, whose first piece is claimed."""
    one, strips = splat(np.float32(1)), columns // LANES
    first, last = take(ahead)
    while first < last:
        following, end_of_following = piece_of(claim(counters, stage), strips, threads)
        row_product(kind, a, packed, scales, first, last - first, following, width, numbers)
        for i in range(0, (last - first) * LANES, LANES):
            lanes = load(numbers, i)
            if add:
                lanes = fma(load(c, first * LANES + i), one, lanes)
            store(c, first * LANES + i, lanes)
        first, last = following, end_of_following


@compiled
def _gated_product_of_row(kind, a, width, packed, inner, columns, scales, numbers, counters, stage, threads, ahead):
    """The same for a single row, whose first piece is claimed."""
    strips = 2 * columns // LANES
    first, last = take(ahead)
    while first < last:
        following, end_of_following = piece_of(claim(counters, stage), strips, threads)
        row_product(kind, a, packed, scales, first, last - first, following, width, numbers)
        for i in range(0, (last - first) // 2 * LANES, LANES):
            gate, up = load(numbers, 2 * i), load(numbers, 2 * i + LANES)
            store(inner, first // 2 * LANES + i, gated(gate, up))
        first, last = following, end_of_following


@compiled
def _product(
    kind, a, num_rows, width, packed, c, columns, stride, add, scales, numbers, counters, stage, threads, ahead
):
    """Sets ``c`` [rows, columns], ``stride`` numbers from row to row, to a product of activations, or adds it."""
    if num_rows == 1:
        _product_of_row(kind, a, width, packed, c, columns, add, scales, numbers, counters, stage, threads, ahead)
        return
    one = splat(np.float32(1))
    unit = claim(counters, stage)
    while unit < columns // BLOCK_COLUMNS:
        for first in range(0, num_rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, num_rows - first)
            block_product(kind, a, packed, scales, unit, first, count, width, numbers)
            for row in range(count):
                for i in range(0, BLOCK_COLUMNS, LANES):
                    place = (first + row) * stride + unit * BLOCK_COLUMNS + i
                    lanes = load(numbers, row * BLOCK_COLUMNS + i)
                    if add:
                        lanes = fma(load(c, place), one, lanes)
                    store(c, place, lanes)
        unit = claim(counters, stage)


@compiled
def _gated_product(kind, a, num_rows, width, packed, inner, columns, scales, numbers, counters, stage, threads, ahead):
    """Sets ``inner`` [rows, columns] to SiLU of the gate times up."""
    if num_rows == 1:
        _gated_product_of_row(kind, a, width, packed, inner, columns, scales, numbers, counters, stage, threads, ahead)
        return
    units = columns // LANES
    # Two units fill a cache line of bfloat16, which two threads would take from each other.
    unit = 2 * claim(counters, stage)
    while unit < units:
        for first in range(0, num_rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, num_rows - first)
            for u in range(unit, min(unit + 2, units)):
                block_product(kind, a, packed, scales, u, first, count, width, numbers)
                for row in range(count):
                    gate, up = load(numbers, row * BLOCK_COLUMNS), load(numbers, row * BLOCK_COLUMNS + LANES)
                    store(inner, (first + row) * columns + u * LANES, gated(gate, up))
        unit = 2 * claim(counters, stage)


@compiled
def _rotate(row, layer, sizes, eps, qkv, bias, q_norm, k_norm, position, cos, sin):
    """Biases, norms of the heads and rotation of one row."""
    dim, half, first = sizes.head_dim, sizes.head_dim // 2, row * sizes.qkv
    if len(bias):
        one = splat(np.float32(1))
        for i in range(0, sizes.qkv, LANES):
            store(qkv, first + i, fma(load(qkv, first + i), one, load(bias, layer * sizes.qkv + i)))
    for head in range(sizes.num_heads + sizes.num_kv_heads):
        place = first + head * dim
        if len(q_norm):
            normalize(qkv, place, q_norm if head < sizes.num_heads else k_norm, layer * dim, dim, eps, qkv, place)
        rotate(qkv, place, half, cos, sin, position * half)


@compiled
def _expect(slot, shape, pages):
    """Asks for the memory of a slot that is written soon."""
    dim, block, offset = shape.head_dim, slot >> shape.block_shift, slot & ((1 << shape.block_shift) - 1)
    for head in range(shape.num_kv_heads):
        target = (block * shape.num_kv_heads + head) * pages.width
        if lies_in_tiles(shape.kind):
            turns = WORD_BYTES // pages.itemsize
            for d in range(0, dim, LANES):
                prefetch(pages.keys, target + offset * dim + d)
                prefetch(pages.values, target + (offset // turns * dim + d) * turns)
        else:
            for d in range(dim):
                prefetch(pages.keys, target + (d << shape.block_shift) + offset)
            for d in range(0, dim, LANES):
                prefetch(pages.values, target + offset * dim + d)


@compiled
def _shape_of(sizes, window):
    return Shape(
        sizes.attention, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.block_shift, window, sizes.tile
    )  # fmt: skip


@compiled
def _place_rows(
    first, last, layer, sizes, eps, qkv, bias, q_norm, k_norm, positions, cos, sin, slots, cache, rounded
):  # fmt: skip
    """Rotates a thread's rows, and puts their keys and values in their places."""
    shape = _shape_of(sizes, 0)
    pages = pages_of_layer(cache, layer, sizes.num_layers, shape)
    if first < last:
        _expect(slots[first], shape, pages)
    for row in range(first, last):
        if row + 1 < last:
            _expect(slots[row + 1], shape, pages)
        _rotate(row, layer, sizes, eps, qkv, bias, q_norm, k_norm, positions[row], cos, sin)
        key = row * sizes.qkv + sizes.num_heads * sizes.head_dim
        value = key + sizes.num_kv_heads * sizes.head_dim
        write_token(qkv, key, qkv, value, slots[row], pages, shape, rounded)


@compiled
def _attend(layer, sizes, scale, qkv, step, cache, attended, scratch, counters, stage, meetings):
    """The attention of one layer."""
    shape = _shape_of(sizes, step.windows[layer])
    pages = pages_of_layer(cache, layer, sizes.num_layers, shape)
    plan = step.plans[layer]
    first, last = step.item_bounds[plan], step.item_bounds[plan + 1]
    items, tables, partial = step.items, step.tables, step.partial
    i = first + claim(counters, stage)
    while i < last:
        # The next item is claimed before this one is run, so that its first tokens are on their way meanwhile.
        following = first + claim(counters, stage)
        run_item(
            pointer(items, i * ITEM), pointer(items, min(following, last - 1) * ITEM), qkv, sizes.qkv, scale, pages,
            tables, shape, partial, attended, scratch,
        )  # fmt: skip
        i = following
    end_items(shape.kind, scratch)
    if step.merge_bounds[plan + 1] > step.merge_bounds[plan]:
        meetings = meet(counters, sizes.threads, meetings)
        i = step.merge_bounds[plan] + claim(counters, stage + MERGES - ATTENTION)
        while i < step.merge_bounds[plan + 1]:
            merge_partials(step.merges[i], step.partial, attended, shape)
            i = step.merge_bounds[plan] + claim(counters, stage + MERGES - ATTENTION)
    return meetings


@compiled
def _first_projection(words, scales, offsets, layer, sizes, per_word):
    """The projection that a layer begins with: qkv."""
    layer_words = sizes.hidden * (sizes.qkv + sizes.num_heads * sizes.head_dim + 3 * sizes.inner) // per_word
    layer_columns = sizes.qkv + 2 * sizes.hidden + 2 * sizes.inner
    return Packed(
        pointer(words, 0), pointer(scales, 0), pointer(offsets, 0), layer * layer_words, layer * layer_columns
    )  # fmt: skip


@compiled
def _behind(packed, columns, width, per_word):
    """The projection that lies behind one of this size."""
    return Packed(
        packed.words, packed.scales, packed.offsets, packed.first_word + columns * width // per_word,
        packed.first_column + columns,
    )  # fmt: skip


@compiled
def _norm_rows(kind, first, last, width, weight, wi, eps, x, activations, scales, row):
    """Norms a thread's rows of the residual stream and makes activations of them."""
    for r in range(first, last):
        normalize(x, r * width, weight, wi, width, eps, row, 0)
        write_row(kind, row, 0, width, activations, r * width, scales, r)


@compiled
def _claim_ahead(kind, num_rows, packed, columns, width, threads, counters, stage, ahead):
    """Claims a thread's first piece of a product that comes, if a single row is computed."""
    if num_rows == 1:
        claim_ahead(packed.first_word, columns, width // kind.per_word, threads, counters, stage, ahead)


@compiled
def _meet(counters, count, meetings, times, stage, since, packed, ahead):
    """Waits for the others, and notes how long the stage took."""
    meetings = meet_fetching(counters, count, meetings, packed.words, ahead)
    now = ticks()
    times[stage] += now - since
    return meetings, now


@compiled
def _mlp(
    kind, first, last, num_rows, layer, sizes, eps, norm, packed, buffers, row, numbers, counters, meetings, times,
    since,
):  # fmt: skip
    """The MLP of one layer, whose packed weights begin at ``packed``, added to the residual stream."""
    count, hidden, inner = sizes.threads, sizes.hidden, sizes.inner
    x, activations, scales = buffers.x, buffers.activations, buffers.scales
    stage = 1 + layer * STAGES_PER_LAYER
    _norm_rows(kind, first, last, hidden, norm, layer * hidden, eps, x, activations, scales, row)
    meetings, since = _meet(counters, count, meetings, times, NORM, since, packed, buffers.ahead)
    _gated_product(
        kind, as_words(activations), num_rows, hidden, packed, buffers.inner, inner, scales, numbers, counters,
        stage + GATE_UP, count, buffers.ahead,
    )  # fmt: skip
    packed = _behind(packed, 2 * inner, hidden, kind.per_word)
    _claim_ahead(kind, num_rows, packed, hidden, inner, count, counters, stage + DOWN, buffers.ahead)
    meetings, since = _meet(counters, count, meetings, times, T_GATE_UP, since, packed, buffers.ahead)
    if quantize_rows(kind, buffers.inner, inner, activations, scales, first, last):
        meetings, since = _meet(counters, count, meetings, times, QUANTIZE, since, packed, buffers.ahead)
    _product(
        kind, words_of(kind, buffers.inner, activations), num_rows, inner, packed, x, hidden, hidden, True, scales,
        numbers, counters, stage + DOWN, count, buffers.ahead,
    )  # fmt: skip
    if layer + 1 < sizes.num_layers:
        packed, stage = _behind(packed, hidden, inner, kind.per_word), stage + STAGES_PER_LAYER
        _claim_ahead(kind, num_rows, packed, sizes.qkv, hidden, count, counters, stage + QKV, buffers.ahead)
    return _meet(counters, count, meetings, times, T_DOWN, since, packed, buffers.ahead)


@kernel
def run_step(
    thread, kind, sizes, eps, scale, weights, head, all_buffers, all_scratch, step, cache, counters, all_times, config
):  # fmt: skip
    """One thread's part of a step, up to the logits of the rows that are sampled. All threads have to call it.

    With no layers and no rows in ``step`` it computes logits alone, of what is in ``buffers.x``. ``counters`` has
    (2 + STAGES_PER_LAYER × layers) × COUNTER zeros; ``times`` [threads, stages] int64 is added to, in ticks of the
    processor's clock; ``config`` is :func:`tiles.full_tiles`.
    """
    kept = np.empty(tiles.CONFIG_BYTES, np.uint8)
    begin(kind, config, kept)
    num_rows, count = len(step.token_ids), sizes.threads
    first, last = num_rows * thread // count, num_rows * (thread + 1) // count
    hidden, width = sizes.hidden, sizes.num_heads * sizes.head_dim
    buffers, scratch = _own_buffers(all_buffers, thread, count), own_scratches(all_scratch, thread, count)
    x, qkv, activations, scales = buffers.x, buffers.qkv, buffers.activations, buffers.scales
    row, numbers, words = buffers.row, buffers.numbers, as_words(activations)
    meetings, times, since = 0, all_times[thread], ticks()
    token_ids, embedding = step.token_ids, weights.embedding
    for r in range(first, last):
        embed(token_ids[r], embedding, x, r * hidden, hidden)
    buffers.ahead[WORDS] = 0
    packed = _first_projection(weights.words, weights.scales, weights.offsets, 0, sizes, kind.per_word)
    if sizes.num_layers > 0:
        _claim_ahead(kind, num_rows, packed, sizes.qkv, hidden, count, counters, 1 + QKV, buffers.ahead)
    for layer in range(sizes.num_layers):
        stage = 1 + layer * STAGES_PER_LAYER
        packed = _first_projection(weights.words, weights.scales, weights.offsets, layer, sizes, kind.per_word)
        _norm_rows(kind, first, last, hidden, weights.attention_norm, layer * hidden, eps, x, activations, scales, row)
        meetings, since = _meet(counters, count, meetings, times, NORM, since, packed, buffers.ahead)
        _product(
            kind, words, num_rows, hidden, packed, qkv, sizes.qkv, sizes.qkv, False, scales, numbers, counters,
            stage + QKV, count, buffers.ahead,
        )  # fmt: skip
        packed = _behind(packed, sizes.qkv, hidden, kind.per_word)
        _claim_ahead(kind, num_rows, packed, hidden, width, count, counters, stage + OUTPUT, buffers.ahead)
        meetings, since = _meet(counters, count, meetings, times, T_QKV, since, packed, buffers.ahead)
        _place_rows(
            first, last, layer, sizes, eps, qkv, weights.qkv_bias, weights.q_norm, weights.k_norm, step.positions,
            step.cos, step.sin, step.slots, cache, scratch.rounded,
        )  # fmt: skip
        meetings, since = _meet(counters, count, meetings, times, ROTATE, since, packed, buffers.ahead)
        meetings = _attend(
            layer, sizes, scale, qkv, step, cache, buffers.attended, scratch, counters, stage + ATTENTION, meetings
        )
        meetings, since = _meet(counters, count, meetings, times, T_ATTENTION, since, packed, buffers.ahead)
        if quantize_rows(kind, buffers.attended, width, activations, scales, first, last):
            meetings, since = _meet(counters, count, meetings, times, QUANTIZE, since, packed, buffers.ahead)
        _product(
            kind, words_of(kind, buffers.attended, activations), num_rows, width, packed, x, hidden, hidden,
            True, scales, numbers, counters, stage + OUTPUT, count, buffers.ahead,
        )  # fmt: skip
        packed = _behind(packed, hidden, width, kind.per_word)
        _claim_ahead(kind, num_rows, packed, 2 * sizes.inner, hidden, count, counters, stage + GATE_UP, buffers.ahead)
        meetings, since = _meet(counters, count, meetings, times, T_OUTPUT, since, packed, buffers.ahead)
        meetings, since = _mlp(
            kind, first, last, num_rows, layer, sizes, eps, weights.mlp_norm, packed, buffers, row, numbers, counters,
            meetings, times, since,
        )  # fmt: skip
    if len(head.rows):
        score(
            thread, kind, sizes, eps, weights.final_norm, head, buffers, counters,
            1 + sizes.num_layers * STAGES_PER_LAYER, meetings,
        )  # fmt: skip
        times[T_HEAD] += ticks() - since
    end(kind, kept)
