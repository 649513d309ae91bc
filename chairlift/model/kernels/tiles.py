"""Matrix tiles of x86 processors (AMX): eight registers of 16 rows by 64 bytes, and products of them.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18. A thread configures its tiles before
it uses them. Other libraries of the process do the same and remember what they configured, so their configuration is
put back afterwards.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chairlift.model.kernels.memory import WORD_BYTES, bytes_of

TILE_ROWS = 16
TILE_BYTES = 64
CONFIG_BYTES = 64
# Linux hands out the tiles' state only to processes that ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@cache
def available() -> bool:
    """Whether this process may compute bfloat16 and int8 products in tiles, and those of few rows in vectors."""
    features = binding.get_host_cpu_features()
    needed = ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16", "avx512vnni")
    if not all(features.get(name) for name in needed) or platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def full_tiles() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The configuration of eight tiles, each of its full size."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1  # the only palette there is
    config[16:32].view(np.uint16)[:] = TILE_BYTES
    config[48:56] = TILE_ROWS
    return config


def emit(builder: Any, name: str, *arguments: Any) -> None:
    """For intrinsics: one of LLVM's ``llvm.x86`` operations."""
    kinds = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kinds, f"llvm.x86.{name}"), arguments)  # type: ignore[no-untyped-call]


def _config_operation(name: str) -> Any:
    @intrinsic
    def operation(typing_context: Any, config: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit(builder, name, bytes_of(context, builder, config, arguments[0], _I64(0)))
            return context.get_dummy_value()

        return types.void(config), generate

    return operation


configure = _config_operation("ldtilecfg")
"""Sets up this thread's tiles from 64 bytes."""
keep_configuration = _config_operation("sttilecfg")
"""Writes how this thread's tiles are set up to 64 bytes."""


@intrinsic
def clear_block(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Zeroes the block: tiles 0 to 3, two by two, which are 32 rows by 32 columns of four-byte numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for tile in range(4):
            emit(builder, "tilezero", _I8(tile))
        return context.get_dummy_value()

    return types.void(), generate


def _move(name: str, rows: int) -> Any:
    @intrinsic
    def operation(typing_context: Any, array: Any, index: Any, stride: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array_, index_, stride_ = arguments
            pitch = builder.mul(stride_, _I64(WORD_BYTES))
            for tile in range(2 * rows):
                place = builder.add(index_, builder.mul(stride_, _I64(TILE_ROWS * (tile // 2))))
                place = builder.add(place, _I64(TILE_ROWS * (tile % 2)))
                emit(builder, name, _I8(tile), bytes_of(context, builder, array, array_, place), pitch)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.intp), generate

    return operation


load_block = _move("tileloadd64", 2), _move("tileloadd64", 1)
"""Reads the block, or its upper half, from ``array[index]`` on: rows of 32 numbers of four bytes, ``stride`` numbers
apart."""
store_block = _move("tilestored64", 2), _move("tilestored64", 1)
"""Writes it there."""


def _multiply(product: str, rows: int) -> Any:
    @intrinsic
    def operation(
        typing_context: Any, a: Any, ai: Any, stride: Any, b: Any, bi: Any, pitch: Any, strip: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a_, ai_, stride_, b_, bi_, pitch_, strip_ = arguments

            def load(tile: int, kind: Any, array: Any, place: Any, stride: Any) -> None:
                address = bytes_of(context, builder, kind, array, place)
                emit(builder, "tileloadd64", _I8(tile), address, builder.mul(stride, _I64(WORD_BYTES)))

            def load_rows(row: int) -> None:
                load(4 + row, a, a_, builder.add(ai_, builder.mul(stride_, _I64(TILE_ROWS * row))), stride_)

            def multiply(row: int, column: int) -> None:
                emit(builder, product, _I8(2 * row + column), _I8(4 + row), _I8(6 + column))

            # Each load stands where a product can run beside it.
            load(6, b, b_, bi_, pitch_)
            load_rows(0)
            multiply(0, 0)
            load(7, b, b_, builder.add(bi_, strip_), pitch_)
            multiply(0, 1)
            for row in range(1, rows):
                load_rows(row)
                multiply(row, 0)
                multiply(row, 1)
            return context.get_dummy_value()

        signature = types.void(a, types.intp, types.intp, b, types.intp, types.intp, types.intp)
        return signature, generate

    return operation


multiply_bfloat16 = _multiply("tdpbf16ps", 2), _multiply("tdpbf16ps", 1)
"""Adds to the block, or its upper half, a step of a product: 16 words of each row of ``a``, which begin at word ``ai``
and lie ``stride`` words apart, times two tiles of ``b``, at word ``bi`` and ``strip`` words behind it, whose rows lie
``pitch`` words apart. Words are pairs of bfloat16."""
multiply_int8 = _multiply("tdpbusd", 2), _multiply("tdpbusd", 1)
"""The same for words of four unsigned bytes in ``a``, and of four signed ones in ``b``."""
