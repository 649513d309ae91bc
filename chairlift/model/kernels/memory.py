"""Memory of kernels: where it begins, and pointers into it.

A vector or a row of a tile that lies across two cache lines is loaded as two, and NumPy's own large arrays begin 16
bytes into a line: products in tiles took more than twice as long with them.

Kernels hand pointers to their pieces rather than arrays. An array is seven numbers, one of which counts references;
taking one from a tuple counts it up and down with a locked instruction, and passing the tuple on does so for all of
them. Pieces that last a microsecond spent half of it so. Whoever calls a kernel keeps the memory alive.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chairlift.model.kernels.compiling import compiled

CACHE_LINE = 64
WORD_BYTES = 4


def aligned(size: int, dtype: npt.DTypeLike, *, zeros: bool = False) -> npt.NDArray[Any]:
    """An array of so many numbers, flat, that begins with a cache line.

    Args:
        zeros: whether they have to be zero; else they are what memory held. The system gives zeroed pages, which are
            only there once they are touched.
    """
    kind = np.dtype(dtype)
    make = np.zeros if zeros else np.empty
    memory = make(size * kind.itemsize + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    return memory[first : first + size * kind.itemsize].view(kind)


def for_threads(threads: int, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros, so many or a few more for each thread, of which each finds its own with :func:`part`."""
    line = CACHE_LINE // np.dtype(dtype).itemsize
    return aligned(threads * -(-size // line) * line, dtype, zeros=True)


def operation(typing: Callable[..., tuple[Any, Callable[..., Any]]]) -> Any:
    """An operation for kernels: ``typing`` returns its signature, and what emits its code."""
    return intrinsic(typing)


def data_of(context: Any, builder: Any, kind: Any, memory: Any) -> Any:
    """For intrinsics: where an array, or what a pointer points to, begins."""
    return memory if isinstance(kind, types.CPointer) else context.make_array(kind)(context, builder, memory).data


def bytes_of(context: Any, builder: Any, kind: Any, memory: Any, index: Any) -> Any:
    """For intrinsics: where ``memory[index]`` is, as a pointer to bytes."""
    return builder.bitcast(builder.gep(data_of(context, builder, kind, memory), [index]), ir.IntType(8).as_pointer())


def ask_for(builder: Any, place: Any, level: int) -> None:
    """For intrinsics: prefetches a line into all caches (level 3) or into the second and those behind it (level 2)."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    builder.call(function, [place, number(0), number(level), number(1)])  # to read, of data


@operation
def pointer(typing_context: Any, memory: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Where ``memory[index]`` is: of an array as if it were flat, or of a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(data_of(context, builder, memory, arguments[0]), [arguments[1]])

    return types.CPointer(memory.dtype)(memory, types.intp), generate  # type: ignore[no-untyped-call]


@operation
def as_words(typing_context: Any, memory: Any) -> tuple[Any, Callable[..., Any]]:
    """The same memory as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(data_of(context, builder, memory, arguments[0]), ir.IntType(32).as_pointer())

    return types.CPointer(types.int32)(memory), generate  # type: ignore[no-untyped-call]


@operation
def as_floats(typing_context: Any, memory: Any) -> tuple[Any, Callable[..., Any]]:
    """The same memory as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(data_of(context, builder, memory, arguments[0]), ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(memory), generate  # type: ignore[no-untyped-call]


@operation
def own_parts(typing_context: Any, memories: Any, thread: Any, threads: Any) -> tuple[Any, Callable[..., Any]]:
    """A thread's part of each array of a named tuple: a tuple of the same name, of pointers."""
    result = types.NamedTuple([types.CPointer(t.dtype) for t in memories.types], memories.instance_class)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = []
        for i, kind in enumerate(memories.types):
            array = context.make_array(kind)(context, builder, builder.extract_value(arguments[0], i))
            size = builder.sdiv(array.nitems, arguments[2])
            pointers.append(builder.gep(array.data, [builder.mul(size, arguments[1])]))
        return context.make_tuple(builder, result, pointers)

    return result(memories, types.intp, types.intp), generate


@compiled
def part(memory: Any, thread: int, threads: int) -> Any:
    """A thread's part of what is there for all."""
    return pointer(memory, len(memory) // threads * thread)
