"""Scores of keys and sums of values by dot-product instructions, a few query rows at a time.

One instruction multiplies two pairs of bfloat16, or four pairs of int8, in each of its sixteen lanes and adds them up
(AVX512-BF16 and AVX512-VNNI; Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). Such a group is a
word of four bytes. The numbers of a key's group lie in as many rows of its block, and those of a group of tokens'
values too; what is loaded is therefore shuffled into words once, and then serves all rows.

The cache is read in pieces of sixteen tokens, at places given as addresses. While a piece is read, another that is read
soon is asked for, line by line: requests in bulk would fill the few buffers that there are for lines on their way, and
everything would wait for them.

What int8 meets has sixteen bits, in two int8 numbers, high and low: eight would cost as much accuracy as the cache
does.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from chairlift.model.kernels.memory import CACHE_LINE, data_of, operation
from chairlift.model.kernels.simd import LANES, vector

CHUNK = 64
"""Numbers of a head that are taken at a time: a head's width is a multiple of it."""
BFLOAT16_ROWS, INT8_ROWS = 4, 3
"""Query rows at most, whose sums fit the registers."""
PAIR, GROUP = 2, 4
"""Numbers to a word, of bfloat16 and of int8."""
WIDEST = 512
"""Numbers of a head at most, so that the scores of int8 keys fit 32 bits."""
NEAR, FAR = 2, 2
"""How many pieces ahead the cache is asked for, all of its lines; and how many further one line in ``LINES`` is, which
has the second-level cache begin with those behind it."""
LINES = 4
INT8_SPAN = 256
"""Tokens at most, whose weighted int8 values add up to no more than 32 bits."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32X16, _I32X16 = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
_VECTORS = CHUNK // LANES


# ---- what is emitted ----


def _shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _I32(0))
    return _shuffled(builder, one, one, [0] * LANES)


def _dot(builder: Any, name: str, total: Any, first: Any, second: Any) -> None:
    """Adds the products of words to a sum; by its name, since what LLVM calls it changes from version to version."""
    before = builder.load(total)
    kind = ir.FunctionType(before.type, [before.type, _I32X16, _I32X16])
    words = [builder.bitcast(x, _I32X16) for x in (first, second)]
    builder.store(builder.asm(kind, f"{name} $3, $2, $0", "=v,0,v,v", [before, *words], False), total)


def _load(builder: Any, address: Any, lanes: int, bits: int) -> Any:
    kind = ir.VectorType(ir.IntType(bits), lanes)
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=bits // 8)


def _ask_for(builder: Any, address: Any, level: int) -> None:
    """Prefetches a line into all caches (level 3) or into the second and those behind it (level 2)."""
    byte = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    builder.call(function, [builder.inttoptr(address, byte), _I32(0), _I32(level), _I32(1)])


def _plus(builder: Any, base: Any, *terms: Any) -> Any:
    for term in terms:
        base = builder.add(base, _I64(term) if isinstance(term, int) else term)
    return base


def _times(builder: Any, x: Any, factor: Any) -> Any:
    return builder.mul(x, _I64(factor) if isinstance(factor, int) else factor)


def _sums(builder: Any, count: int, kind: Any) -> list[Any]:
    return [cgutils.alloca_once(builder, kind) for _ in range(count)]  # type: ignore[no-untyped-call]


class _Memory:
    """An array, or a pointer, of a kernel's arguments."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self._builder, self._data = builder, data_of(context, builder, kind, value)

    def at(self, pointee: Any, *index: Any) -> Any:
        """A pointer to what begins at ``memory[sum of index]``."""
        place = self._builder.gep(self._data, [_plus(self._builder, _I64(0), *index)])
        return self._builder.bitcast(place, pointee.as_pointer())

    def one(self, pointee: Any, *index: Any) -> Any:
        """What is there."""
        return self._builder.load(self.at(pointee, *index))

    def lanes(self, pointee: Any, *index: Any) -> Any:
        """The same in each lane."""
        return _splat(self._builder, self.one(pointee, *index))


class _Piece:
    """Where a piece of the cache lies, and those that are read soon."""

    def __init__(self, builder: Any, places: _Memory, ahead: _Memory, index: Any, offset: Any = 0) -> None:
        self._builder = builder
        self.place, self._near, self._far = (
            _plus(builder, memory.one(_I64, index, further), offset)
            for memory, further in ((places, 0), (ahead, 0), (ahead, FAR))
        )

    def ask_for(self, offset: Any, *, far: bool) -> None:
        """Asks for the line there of the piece that is read soon, and perhaps of the one that is read later."""
        _ask_for(self._builder, _plus(self._builder, self._near, offset), 3)
        if far:
            _ask_for(self._builder, _plus(self._builder, self._far, offset), 2)


def _key_words(builder: Any, place: Any, pitch: Any, group: int) -> Any:
    """One word of each of sixteen keys: of as many rows of a block as a group has numbers, ``pitch`` bytes apart."""
    rows = [_load(builder, _plus(builder, place, _times(builder, pitch, i)), LANES, 32 // group) for i in range(group)]
    while len(rows) > 1:
        both = list(range(2 * rows[0].type.count))
        rows = [_shuffled(builder, a, b, both) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    order = [row * LANES + token for token in range(LANES) for row in range(group)]
    return _shuffled(builder, rows[0], rows[0], order)


def _value_pairs(builder: Any, lines: list[list[Any]]) -> list[Any]:
    """Words of two tokens' bfloat16 values: of 64 numbers, in order."""
    one, two = lines
    pairs = []
    for a, b in zip(one, two, strict=True):
        for first in (0, LANES):
            order = [n + token * 2 * LANES for n in range(first, first + LANES) for token in range(PAIR)]
            pairs.append(_shuffled(builder, a, b, order))
    return pairs


def _value_groups(builder: Any, lines: list[Any]) -> list[Any]:
    """Words of four tokens' int8 values: of 64 numbers, vector i those from 4 i to 4 i + 3 of every sixteen."""

    def unpack(a: Any, b: Any, size: int, upper: int) -> Any:
        """Units of ``size`` bytes of both in turns, of one half of each sixteen bytes."""
        order = []
        for lane in range(0, CACHE_LINE, LANES):
            for unit in range(lane + upper * LANES // 2, lane + (upper + 1) * LANES // 2, size):
                order += [line + unit + i for line in (0, CACHE_LINE) for i in range(size)]
        return _shuffled(builder, a, b, order)

    one, two = ([unpack(a, b, 1, upper) for upper in range(2)] for a, b in (lines[:2], lines[2:]))
    return [unpack(one[i // 2], two[i // 2], 2, i % 2) for i in range(_VECTORS)]


def _in_order(builder: Any, vectors: list[Any]) -> list[Any]:
    """What :func:`_value_groups` led to, in the order of a head's numbers."""
    ordered = []
    for i in range(_VECTORS):
        quarter = list(range(_VECTORS * i, _VECTORS * (i + 1)))
        order = quarter + [LANES + lane for lane in quarter]
        first, second = (_shuffled(builder, a, b, order) for a, b in (vectors[:2], vectors[2:]))
        ordered.append(_shuffled(builder, first, second, list(range(LANES))))
    return ordered


def _joined(builder: Any, high: Any, low: Any) -> Any:
    """Sums of high and low bytes' products as the float32 that they stand for."""
    shifted = builder.shl(builder.load(high), ir.Constant(_I32X16, [8] * LANES))
    return builder.sitofp(builder.add(shifted, builder.load(low)), _F32X16)


# ---- scores ----


def _score_bfloat16(rows: int) -> Any:
    def generate(builder: Any, query: Any, q: Any, width: Any, piece: Any, pitch: Any, scores: Any, s: Any, span: Any):  # type: ignore[no-untyped-def]
        words = builder.udiv(width, _I64(PAIR))
        # Two sums for each row: one would wait for itself.
        sums = [_sums(builder, 2, _F32X16) for _ in range(rows)]
        for total in (total for pair in sums for total in pair):
            builder.store(_F32X16(None), total)
        with cgutils.for_range(builder, builder.udiv(words, _I64(LINES))) as step:
            begin = _times(builder, step.index, LINES)
            for i in range(LINES):
                word = _plus(builder, begin, i)
                piece.ask_for(_times(builder, word, CACHE_LINE), far=i == 0)
                at = _plus(builder, piece.place, _times(builder, _times(builder, word, PAIR), pitch))
                keys = _key_words(builder, at, pitch, PAIR)
                for row, pair in enumerate(sums):
                    number = query.lanes(_I32, q, word, _times(builder, words, row))
                    _dot(builder, "vdpbf16ps", pair[i % 2], number, keys)
        for row, pair in enumerate(sums):
            both = builder.fadd(*(builder.load(total) for total in pair))
            builder.store(both, scores.at(_F32X16, s, _times(builder, span, row)), align=4)

    return _score_operation(generate)


def _score_int8(rows: int) -> Any:
    def generate(builder: Any, query: Any, q: Any, width: Any, piece: Any, pitch: Any, scores: Any, s: Any, span: Any):  # type: ignore[no-untyped-def]
        words = builder.udiv(width, _I64(GROUP))
        row_words = _plus(builder, _times(builder, words, 2), 2)
        sums = [_sums(builder, 2, _I32X16) for _ in range(rows)]
        # The instruction multiplies unsigned numbers by signed ones. Keys become unsigned, 128 larger; what this adds
        # to the sums stands behind each row's words.
        more = ir.Constant(ir.VectorType(_I8, CACHE_LINE), [-128] * CACHE_LINE)
        for row, pair in enumerate(sums):
            for half, total in enumerate(pair):
                added = query.lanes(_I32, q, _times(builder, row_words, row), _times(builder, words, 2), half)
                builder.store(builder.neg(added), total)
        with cgutils.for_range(builder, builder.udiv(words, _I64(LINES))) as step:
            begin = _times(builder, step.index, LINES)
            for i in range(LINES):
                word = _plus(builder, begin, i)
                piece.ask_for(_times(builder, word, CACHE_LINE), far=i == 0)
                at = _plus(builder, piece.place, _times(builder, _times(builder, word, GROUP), pitch))
                keys = builder.xor(_key_words(builder, at, pitch, GROUP), more)
                for row, pair in enumerate(sums):
                    for half, total in enumerate(pair):
                        number = query.lanes(
                            _I32, q, _times(builder, row_words, row), _times(builder, words, half), word
                        )
                        _dot(builder, "vpdpbusd", total, keys, number)
        for row, pair in enumerate(sums):
            builder.store(_joined(builder, *pair), scores.at(_F32X16, s, _times(builder, span, row)), align=4)

    return _score_operation(generate)


def _score_operation(emit: Callable[..., None]) -> Any:
    @operation
    def score(
        typing_context: Any, query: Any, q: Any, width: Any, places: Any, ahead: Any, count: Any, pitch: Any,
        scores: Any, s: Any, span: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, q_, width_, _, _, count_, pitch_, _, s_, span_ = arguments
            words, where, soon, to = (
                _Memory(context, builder, kind, arguments[i])
                for kind, i in ((query, 0), (places, 3), (ahead, 4), (scores, 7))
            )
            with cgutils.for_range(builder, count_) as loop:
                piece = _Piece(builder, where, soon, loop.index)
                first = _plus(builder, s_, _times(builder, loop.index, LANES))
                emit(builder, words, q_, width_, piece, pitch_, to, first, span_)
            return context.get_dummy_value()

        number = types.intp
        signature = types.void(query, number, number, places, ahead, number, number, scores, number, number)
        return signature, generate

    return score


# ---- sums of values ----


def _add_bfloat16(rows: int) -> Any:
    def start(builder: Any, targets: Any, factors: Any) -> list[Any]:
        sums = [_sums(builder, _VECTORS, _F32X16) for _ in range(rows)]
        for row, totals in enumerate(sums):
            for total, target in zip(totals, targets[row], strict=True):
                before = builder.load(target, align=4)
                builder.store(builder.fmul(before, factors.lanes(ir.FloatType(), row)), total)
        return sums

    def go_on(builder: Any, sums: list[Any], piece: Any, row_bytes: Any, weights: Any, w: Any, span: Any) -> None:
        with cgutils.for_range(builder, _I64(LANES // PAIR)) as step:
            lines: list[list[Any]] = []
            for token in range(PAIR):
                offset = _times(builder, _plus(builder, _times(builder, step.index, PAIR), token), row_bytes)
                lines.append([])
                for there in (offset, _plus(builder, offset, CACHE_LINE)):
                    lines[-1].append(_load(builder, _plus(builder, piece.place, there), 2 * LANES, 16))
                    piece.ask_for(there, far=there is offset and token == 0)
            pairs = _value_pairs(builder, lines)
            for row, totals in enumerate(sums):
                number = weights.lanes(_I32, w, _times(builder, span, row), step.index)
                for total, pair in zip(totals, pairs, strict=True):
                    _dot(builder, "vdpbf16ps", total, number, pair)

    def finish(builder: Any, sums: list[Any], targets: Any, factors: Any, steps: Any) -> None:
        for row, totals in enumerate(sums):
            for total, target in zip(totals, targets[row], strict=True):
                builder.store(builder.load(total), target, align=4)

    return _add_operation(rows, PAIR, start, go_on, finish)


def _add_int8(rows: int) -> Any:
    def start(builder: Any, targets: Any, factors: Any) -> list[Any]:
        sums = [[_sums(builder, _VECTORS, _I32X16) for _ in range(2)] for _ in range(rows)]
        for total in (total for halves in sums for totals in halves for total in totals):
            builder.store(_I32X16(None), total)
        return sums

    def go_on(builder: Any, sums: list[Any], piece: Any, row_bytes: Any, weights: Any, w: Any, span: Any) -> None:
        with cgutils.for_range(builder, _I64(LANES // GROUP)) as step:
            lines = []
            for token in range(GROUP):
                offset = _times(builder, _plus(builder, _times(builder, step.index, GROUP), token), row_bytes)
                lines.append(_load(builder, _plus(builder, piece.place, offset), CACHE_LINE, 8))
                piece.ask_for(offset, far=token == 0)
            groups = _value_groups(builder, lines)
            for row, halves in enumerate(sums):
                for half, totals in enumerate(halves):
                    number = weights.lanes(_I32, w, _times(builder, span, 2 * row + half), step.index)
                    for total, group in zip(totals, groups, strict=True):
                        _dot(builder, "vpdpbusd", total, number, group)

    def finish(builder: Any, sums: list[Any], targets: Any, factors: Any, steps: Any) -> None:
        for row, halves in enumerate(sums):
            worth, factor = (numbers.lanes(ir.FloatType(), row) for numbers in (steps, factors))
            totals = [_joined(builder, high, low) for high, low in zip(*halves, strict=True)]
            for total, target in zip(_in_order(builder, totals), targets[row], strict=True):
                before = builder.fmul(builder.load(target, align=4), factor)
                builder.store(builder.fadd(before, builder.fmul(total, worth)), target, align=4)

    return _add_operation(rows, GROUP, start, go_on, finish)


def _add_operation(rows: int, group: int, start: Any, go_on: Any, finish: Any) -> Any:
    @operation
    def add(
        typing_context: Any, weights: Any, w: Any, span: Any, places: Any, ahead: Any, count: Any, width: Any,
        factors: Any, steps: Any, output: Any, o: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, w_, span_, _, _, count_, width_, _, _, _, o_ = arguments
            words, where, soon, before, worth, to = (
                _Memory(context, builder, kind, arguments[i])
                for kind, i in ((weights, 0), (places, 3), (ahead, 4), (factors, 7), (steps, 8), (output, 9))
            )
            itemsize = WORD_BYTES // group
            row_bytes = _times(builder, width_, itemsize)
            with cgutils.for_range(builder, builder.udiv(width_, _I64(CHUNK))) as chunk:
                number = _times(builder, chunk.index, CHUNK)
                targets = [
                    [to.at(_F32X16, o_, number, _times(builder, width_, row), i * LANES) for i in range(_VECTORS)]
                    for row in range(rows)
                ]
                sums = start(builder, targets, before)
                with cgutils.for_range(builder, count_) as loop:
                    piece = _Piece(builder, where, soon, loop.index, _times(builder, number, itemsize))
                    first = _plus(builder, w_, _times(builder, loop.index, LANES // group))
                    go_on(builder, sums, piece, row_bytes, words, first, span_)
                finish(builder, sums, targets, before, worth)
            return context.get_dummy_value()

        number = types.intp
        signature = types.void(
            weights, number, number, places, ahead, number, number, factors, steps, output, number
        )  # fmt: skip
        return signature, generate

    return add


WORD_BYTES = 4

score_bfloat16 = tuple(_score_bfloat16(rows) for rows in range(1, BFLOAT16_ROWS + 1))
score_int8 = tuple(_score_int8(rows) for rows in range(1, INT8_ROWS + 1))
"""For one, two, … rows: ``score(query, q, width, places, ahead, count, pitch, scores, s, span)``.

Sets rows of ``scores`` (float32, from ``s`` on, ``span`` apart) to products of rows of ``query`` and the keys of
``count`` pieces of tokens. ``query`` is int32 words, from ``q`` on: of bfloat16, row after row; for int8 a row's high
bytes, its low bytes, and then the sum of either times 128. Keys are rows of tokens, ``pitch`` bytes apart, which begin
at the addresses ``places``; ``ahead`` are addresses of what is read soon, of ``FAR`` pieces more. ``width`` is the
head's."""
add_bfloat16 = tuple(_add_bfloat16(rows) for rows in range(1, BFLOAT16_ROWS + 1))
add_int8 = tuple(_add_int8(rows) for rows in range(1, INT8_ROWS + 1))
"""For one, two, … rows: ``add(weights, w, span, places, ahead, count, width, factors, steps, output, o)``.

Multiplies rows of ``output`` (float32, ``width`` numbers each, from ``o`` on) with ``factors``, and adds the weighted
values of ``count`` pieces of tokens. ``weights`` is int32 words, from ``w`` on: rows of bfloat16, ``span`` words apart;
for int8 rows of high and of low bytes in turns, both unsigned, and what they sum to is multiplied with ``steps``, one
for each row as ``factors`` are."""


# ---- what they take ----


@operation
def address(typing_context: Any, memory: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """The address of ``memory[index]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(builder.gep(data_of(context, builder, memory, arguments[0]), [arguments[1]]), _I64)

    return types.int64(memory, types.intp), generate


def _store_halves(*, signed: bool) -> Any:
    @operation
    def store(typing_context: Any, memory: Any, high: Any, low: Any, lanes: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            # Adding 1.5 * 2^23 to a float32 leaves it rounded to an integer in the low bits.
            shift, bits = (ir.Constant(kind, [x] * LANES) for kind, x in ((_F32X16, 12582912.0), (_I32X16, 0x4B400000)))
            whole = builder.sub(builder.bitcast(builder.fadd(arguments[3], shift), _I32X16), bits)
            kind = ir.VectorType(_I8, LANES)
            lower = builder.trunc(whole, kind)
            if signed:
                whole = builder.sub(whole, builder.sext(lower, _I32X16))
            upper = builder.trunc(builder.lshr(whole, ir.Constant(_I32X16, [8] * LANES)), kind)
            to = _Memory(context, builder, memory, arguments[0])
            for place, half in zip(arguments[1:3], (upper, lower), strict=True):
                builder.store(half, to.at(kind, place), align=1)
            return context.get_dummy_value()

        return types.void(memory, types.intp, types.intp, vector), generate

    return store


store_signed_halves = _store_halves(signed=True)
"""Writes numbers, rounded to integers of at most 127 × 256 in size, as two int8 each, of which the first counts 256
times: to ``memory[high:high + 16]`` and ``memory[low:low + 16]`` of int8."""
store_unsigned_halves = _store_halves(signed=False)
"""The same for numbers from 0 to 65,535, as two unsigned bytes each."""


@operation
def zero_outside(typing_context: Any, a: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes ``low <= lane < high`` of ``a``; zero in the others, whatever they hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, first, last = arguments
        lane = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
        kept = builder.and_(
            builder.icmp_signed(">=", lane, _splat(builder, first)),
            builder.icmp_signed("<", lane, _splat(builder, last)),
        )
        return builder.select(kept, value, _F32X16(None))

    return vector(vector, types.int64, types.int64), generate
