"""Vectors of sixteen float32 lanes for Numba kernels.

LLVM's vectoriser gives up on short loops over arrays that might overlap, and does not say so. Here a kernel states its
vectors itself, and LLVM fits them to the registers that the processor has.

Arrays are flat and contiguous, or pointers; of float32, of int16 that holds the bits of bfloat16, or of int8. Nothing
is bounds-checked.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import models, register_model

from chairlift.model.kernels.memory import ask_for, bytes_of, data_of, operation

LANES = 16

_I8 = ir.VectorType(ir.IntType(8), LANES)
_I16 = ir.VectorType(ir.IntType(16), LANES)
_I32 = ir.VectorType(ir.IntType(32), LANES)
_F32 = ir.VectorType(ir.FloatType(), LANES)

# Minimax polynomial of 2^x on [-0.5, 0.5], highest power first; its relative error is below 2e-7.
_EXP2 = (1.5353e-04, 1.33988e-03, 9.61843e-03, 5.550332e-02, 2.4022648e-01, 6.9314718e-01, 1.0)
# Adding 1.5 * 2^23 to a float32 leaves it rounded to an integer in the low bits.
_ROUND = 12582912.0
_EXP2_MIN = -126.0


class _Vector(types.Type):
    """Sixteen float32 lanes, held in registers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _F32)  # type: ignore[no-untyped-call]


def _splat(builder: Any, scalar: Any) -> Any:
    """A vector with the same scalar in each lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _index(0))
    return builder.shuffle_vector(one, one, ir.Constant(_I32, [0] * LANES))


def _external(builder: Any, result: Any, parameters: list[Any], name: str) -> Any:
    """A function that LLVM provides."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)  # type: ignore[no-untyped-call]


def _fmuladd(builder: Any) -> Any:
    return _external(builder, _F32, [_F32] * 3, f"llvm.fmuladd.v{LANES}f32")


def _index(i: int) -> Any:
    return ir.Constant(ir.IntType(32), i)


def _float(x: float) -> Any:
    # LLVM takes a float32 constant only as a number that float32 can hold.
    return ir.Constant(ir.FloatType(), struct.unpack("f", struct.pack("f", x))[0])


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    data = data_of(context, builder, array_type, array)
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def _stored(array_type: Any) -> Any:
    """What lanes are in such an array."""
    kinds = {types.float32: _F32, types.int32: _I32, types.int16: _I16, types.int8: _I8}
    if array_type.dtype not in kinds:
        raise TypeError(f"vectors are loaded from float32, int32, int16 or int8, not {array_type.dtype}")
    return kinds[array_type.dtype]


def _rounded_to_int8(builder: Any, lanes: Any) -> Any:
    bits = builder.bitcast(builder.fadd(lanes, _splat(builder, _float(_ROUND))), _I32)
    return builder.trunc(bits, _I8)


def _rounded_to_bfloat16(builder: Any, lanes: Any) -> Any:
    if binding.get_host_cpu_features().get("avx512bf16"):
        # By its name, since what LLVM calls the instruction changes from version to version.
        return builder.asm(ir.FunctionType(_I16, [_F32]), "vcvtneps2bf16 $1, $0", "=v,v", [lanes], False)
    bits = builder.bitcast(lanes, _I32)
    sixteen, one, half, quiet = (_splat(builder, ir.Constant(ir.IntType(32), c)) for c in (16, 1, 0x7FFF, 0x7FC0))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.lshr(builder.add(bits, builder.add(odd, half)), sixteen)
    # Rounding would carry a NaN over into a number.
    nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(builder.select(nan, quiet, rounded), _I16)


@operation
def load(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes from ``array[index:index + 16]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = _stored(array)
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], stored)
        lanes = builder.load(pointer, align=array.dtype.bitwidth // 8)
        if stored is _F32:
            return lanes
        if stored is _I32:
            return builder.sitofp(lanes, _F32)
        if stored is _I8:
            return builder.sitofp(builder.sext(lanes, _I32), _F32)
        high = builder.shl(builder.zext(lanes, _I32), _splat(builder, ir.Constant(ir.IntType(32), 16)))
        return builder.bitcast(high, _F32)

    return vector(array, types.intp), generate


@operation
def store(typing_context: Any, array: Any, index: Any, lanes: Any) -> tuple[Any, Callable[..., Any]]:
    """Writes the lanes to ``array[index:index + 16]``, rounded to nearest, ties to even; to int8 from -128 to 127.

    Where the processor has an instruction that rounds to bfloat16, that does: it takes subnormal numbers for zero.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored, value = _stored(array), arguments[2]
        if stored is _I8:
            value = _rounded_to_int8(builder, value)
        if stored is _I16:
            value = _rounded_to_bfloat16(builder, value)
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], stored)
        builder.store(value, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@operation
def store_in_turns(
    typing_context: Any, array: Any, index: Any, turn: Any, lanes: Any
) -> tuple[Any, Callable[..., Any]]:
    """Writes the lanes as :func:`store` does, but one number to each word of four bytes from ``array[index]`` on.

    Of bfloat16 or int8; which number of the words is ``turn``. What else the words hold is not touched, since others
    may be writing it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        round_, bits = {types.int16: (_rounded_to_bfloat16, 16), types.int8: (_rounded_to_int8, 8)}[array.dtype]
        count, word = 32 // bits, ir.IntType(32)
        turn = builder.trunc(arguments[2], word)
        numbers = builder.zext(round_(builder, arguments[3]), _I32)
        numbers = builder.shl(numbers, _splat(builder, builder.mul(turn, word(bits))))
        kind, wide = ir.VectorType(ir.IntType(bits), LANES * count), ir.IntType(LANES * count)
        mask = builder.shl(wide(sum(1 << i for i in range(0, LANES * count, count))), builder.zext(turn, wide))
        mask = builder.bitcast(mask, ir.VectorType(ir.IntType(1), LANES * count))
        to = _pointer(context, builder, array, arguments[0], arguments[1], kind)
        name = f"llvm.masked.store.v{LANES * count}i{bits}.p0"
        masked = _external(builder, ir.VoidType(), [kind, to.type, word, mask.type], name)
        builder.call(masked, [builder.bitcast(numbers, kind), to, word(bits // 8), mask])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), generate


@operation
def pair_up(typing_context: Any, a: Any, b: Any, target: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Writes the lanes of two vectors in turns, as bfloat16: 32 numbers from ``target[index]`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = [_rounded_to_bfloat16(builder, lanes) for lanes in arguments[:2]]
        order = [lane + half * LANES for lane in range(LANES) for half in range(2)]
        both = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
        builder.store(both, _pointer(context, builder, target, arguments[2], arguments[3], both.type), align=2)
        return context.get_dummy_value()

    return types.void(vector, vector, target, types.intp), generate


@operation
def byte_of_words(typing_context: Any, words: Any, index: Any, byte: Any) -> tuple[Any, Callable[..., Any]]:
    """One int8 number of each of sixteen words from ``words[index]`` on (int32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = builder.load(_pointer(context, builder, words, arguments[0], arguments[1], _I32), align=4)
        word = ir.IntType(32)
        up = builder.sub(word(24), builder.mul(builder.trunc(arguments[2], word), word(8)))
        signed = builder.ashr(builder.shl(lanes, _splat(builder, up)), _splat(builder, word(24)))
        return builder.sitofp(signed, _F32)

    return vector(words, types.intp, types.intp), generate


@operation
def prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Asks for the cache line of ``array[index]``, which will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ask_for(builder, bytes_of(context, builder, array, *arguments), 3)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _store_halves(*, signed: bool) -> Any:
    @operation
    def store(typing_context: Any, array: Any, high: Any, low: Any, lanes: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            bits = builder.bitcast(builder.fadd(arguments[3], _splat(builder, _float(_ROUND))), _I32)
            whole = builder.sub(bits, _splat(builder, builder.bitcast(_float(_ROUND), ir.IntType(32))))
            lower = builder.trunc(whole, _I8)
            if signed:
                whole = builder.sub(whole, builder.sext(lower, _I32))
            upper = builder.trunc(builder.lshr(whole, _splat(builder, ir.Constant(ir.IntType(32), 8))), _I8)
            for place, half in zip(arguments[1:3], (upper, lower), strict=True):
                builder.store(half, _pointer(context, builder, array, arguments[0], place, _I8), align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.intp, vector), generate

    return store


store_signed_halves = _store_halves(signed=True)
"""Writes numbers, rounded to integers of at most 127 × 256 in size, as two int8 each, of which the first counts 256
times: to ``array[high:high + 16]`` and ``array[low:low + 16]`` of int8."""
store_unsigned_halves = _store_halves(signed=False)
"""The same for numbers from 0 to 65,535, as two unsigned bytes each."""


@operation
def store_uint8(typing_context: Any, array: Any, index: Any, lanes: Any) -> tuple[Any, Callable[..., Any]]:
    """Writes lanes from -128 to 127, rounded to nearest and 128 larger, to the bytes ``array[index:index + 16]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = _rounded_to_int8(builder, arguments[2])
        number = builder.xor(number, _splat(builder, ir.Constant(ir.IntType(8), 128)))
        builder.store(number, _pointer(context, builder, array, arguments[0], arguments[1], _I8), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@operation
def load_difference(typing_context: Any, a: Any, ai: Any, b: Any, bi: Any) -> tuple[Any, Callable[..., Any]]:
    """Sixteen int32 numbers of ``a`` from ``a[ai]`` on less as many of ``b``, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y = (
            builder.load(_pointer(context, builder, kind, arguments[2 * i], arguments[2 * i + 1], _I32), align=4)
            for i, kind in enumerate((a, b))
        )
        return builder.sitofp(builder.sub(x, y), _F32)

    return vector(a, types.intp, b, types.intp), generate


@operation
def splat(typing_context: Any, scalar: Any) -> tuple[Any, Callable[..., Any]]:
    """The same number in each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return vector(types.float32), generate


@operation
def broadcast(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """The float32 number ``array[index]`` in each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], ir.FloatType())
        return _splat(builder, builder.load(pointer))

    return vector(array, types.intp), generate


@operation
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> tuple[Any, Callable[..., Any]]:
    """``a * b + c`` lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(_fmuladd(builder), arguments)

    return vector(vector, vector, vector), generate


@operation
def maximum(typing_context: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """The larger lane of each pair; ``b`` where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return vector(vector, vector), generate


@operation
def minimum(typing_context: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """The smaller lane of each pair; ``b`` where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *arguments), *arguments)

    return vector(vector, vector), generate


@operation
def divide(typing_context: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """``a / b`` lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fdiv(*arguments)

    return vector(vector, vector), generate


def _between(builder: Any, first: Any, last: Any) -> Any:
    lane = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
    return builder.and_(
        builder.icmp_signed(">=", lane, _splat(builder, first)), builder.icmp_signed("<", lane, _splat(builder, last))
    )


@operation
def keep_between(typing_context: Any, a: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes ``low <= lane < high`` of ``a``; minus infinity in the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kept = _between(builder, *arguments[1:])
        return builder.select(kept, arguments[0], _splat(builder, _float(float("-inf"))))

    return vector(vector, types.int64, types.int64), generate


@operation
def keep_tokens(typing_context: Any, a: Any, token: Any, lows: Any, highs: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes of ``a`` where ``lows <= token < highs``; minus infinity in the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, scalar, first, last = arguments
        token = _splat(builder, scalar)
        kept = builder.and_(builder.fcmp_ordered(">=", token, first), builder.fcmp_ordered("<", token, last))
        return builder.select(kept, value, _splat(builder, _float(float("-inf"))))

    return vector(vector, types.float32, vector, vector), generate


@operation
def zero_outside(typing_context: Any, a: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes ``low <= lane < high`` of ``a``; zero in the others, whatever they hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(_between(builder, *arguments[1:]), arguments[0], _splat(builder, _float(0.0)))

    return vector(vector, types.int64, types.int64), generate


@operation
def exceeds(typing_context: Any, a: Any, limit: Any) -> tuple[Any, Callable[..., Any]]:
    """Whether any lane is larger than a number, or NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = builder.fcmp_unordered(">", arguments[0], _splat(builder, arguments[1]))
        return builder.icmp_unsigned("!=", builder.bitcast(lanes, ir.IntType(LANES)), ir.IntType(LANES)(0))

    return types.boolean(vector, types.float32), generate


@operation
def exp2(typing_context: Any, a: Any) -> tuple[Any, Callable[..., Any]]:
    """2 to the power of each lane, for lanes of at most 127; exactly 0 below -126. NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        fmuladd = _fmuladd(builder)
        shifted = builder.fadd(x, _splat(builder, _float(_ROUND)))
        fraction = builder.fsub(x, builder.fsub(shifted, _splat(builder, _float(_ROUND))))
        power = _splat(builder, _float(_EXP2[0]))
        for coefficient in _EXP2[1:]:
            power = builder.call(fmuladd, [power, fraction, _splat(builder, _float(coefficient))])
        exponent = builder.shl(builder.bitcast(shifted, _I32), _splat(builder, ir.Constant(ir.IntType(32), 23)))
        value = builder.bitcast(builder.add(builder.bitcast(power, _I32), exponent), _F32)
        tiny = builder.fcmp_ordered("<", x, _splat(builder, _float(_EXP2_MIN)))
        return builder.select(tiny, _splat(builder, _float(0.0)), value)

    return vector(vector), generate


def _fold(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines all lanes into one scalar, halving their number each time."""
    width = LANES // 2
    while width:
        order = [(i + width) % LANES for i in range(LANES)]
        lanes = combine(lanes, builder.shuffle_vector(lanes, lanes, ir.Constant(_I32, order)))
        width //= 2
    return builder.extract_element(lanes, _index(0))


@operation
def largest(typing_context: Any, a: Any) -> tuple[Any, Callable[..., Any]]:
    """The largest lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fold(builder, arguments[0], lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))

    return types.float32(vector), generate


@operation
def total(typing_context: Any, a: Any) -> tuple[Any, Callable[..., Any]]:
    """The sum of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fold(builder, arguments[0], builder.fadd)

    return types.float32(vector), generate
