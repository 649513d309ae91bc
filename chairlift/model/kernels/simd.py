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

from chairlift.model.kernels.memory import data_of, operation

LANES = 16

_I8 = ir.VectorType(ir.IntType(8), LANES)
_I16 = ir.VectorType(ir.IntType(16), LANES)
_I32 = ir.VectorType(ir.IntType(32), LANES)
_F32 = ir.VectorType(ir.FloatType(), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)

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
    kinds = {types.float32: _F32, types.int16: _I16, types.int8: _I8}
    if array_type.dtype not in kinds:
        raise TypeError(f"vectors are loaded from float32, int16 or int8, not {array_type.dtype}")
    return kinds[array_type.dtype]


def _rounded_to_int8(builder: Any, lanes: Any) -> Any:
    bits = builder.bitcast(builder.fadd(lanes, _splat(builder, _float(_ROUND))), _I32)
    return builder.trunc(bits, _I8)


@operation
def load(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes from ``array[index:index + 16]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = _stored(array)
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], stored)
        lanes = builder.load(pointer, align=array.dtype.bitwidth // 8)
        if stored is _F32:
            return lanes
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
        if stored is _I16 and binding.get_host_cpu_features().get("avx512bf16"):
            # By its name, since what LLVM calls the instruction changes from version to version.
            value = builder.asm(ir.FunctionType(_I16, [_F32]), "vcvtneps2bf16 $1, $0", "=v,v", [value], False)
        elif stored is _I16:
            bits = builder.bitcast(value, _I32)
            sixteen, one, half, quiet = (
                _splat(builder, ir.Constant(ir.IntType(32), c)) for c in (16, 1, 0x7FFF, 0x7FC0)
            )
            odd = builder.and_(builder.lshr(bits, sixteen), one)
            rounded = builder.lshr(builder.add(bits, builder.add(odd, half)), sixteen)
            # Rounding would carry a NaN over into a number.
            nan = builder.fcmp_unordered("uno", value, value)
            value = builder.trunc(builder.select(nan, quiet, rounded), _I16)
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], stored)
        builder.store(value, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@operation
def interleave(
    typing_context: Any, array: Any, i: Any, j: Any, target: Any, index: Any
) -> tuple[Any, Callable[..., Any]]:
    """Writes the 16 numbers from ``array[i]`` and those from ``array[j]`` on in turns, as bfloat16.

    The array holds bfloat16 or int8; 32 numbers are written from ``target[index]`` on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored, halves = _stored(array), []
        for place in arguments[1:3]:
            lanes = builder.load(
                _pointer(context, builder, array, arguments[0], place, stored), align=array.dtype.bitwidth // 8
            )
            if stored is _I8:
                # A number of eight bits fills no more than the upper half of a float32.
                bits = builder.bitcast(builder.sitofp(builder.sext(lanes, _I32), _F32), _I32)
                lanes = builder.trunc(builder.lshr(bits, _splat(builder, ir.Constant(ir.IntType(32), 16))), _I16)
            halves.append(lanes)
        order = [lane + half * LANES for lane in range(LANES) for half in range(2)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
        both = builder.shuffle_vector(*halves, mask)
        builder.store(both, _pointer(context, builder, target, arguments[3], arguments[4], both.type), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, target, types.intp), generate


@operation
def prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Asks for the cache line of ``array[index]``, which will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = _external(builder, ir.VoidType(), [byte, number, number, number], "llvm.prefetch.p0")
        pointer = _pointer(context, builder, array, arguments[0], arguments[1], ir.IntType(8))
        # To read, to be kept in every level of the cache, data.
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


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


@operation
def keep_between(typing_context: Any, a: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """Lanes ``low <= lane < high`` of ``a``; minus infinity in the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, first, last = arguments
        lane = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        kept = builder.and_(
            builder.icmp_signed(">=", lane, _splat(builder, first)),
            builder.icmp_signed("<", lane, _splat(builder, last)),
        )
        return builder.select(kept, value, _splat(builder, _float(float("-inf"))))

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
