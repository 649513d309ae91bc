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

TILE_ROWS = 16
TILE_BYTES = 64
CONFIG_BYTES = 64
BLOCK_COLUMNS = 32
AHEAD = 32
"""Words that rows are asked for before they are needed, two steps: a tile whose rows come from the second-level cache
takes half as long again to load."""

# Linux hands out the tiles' state only to processes that ask: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BYTES = _I8.as_pointer()


@cache
def available() -> bool:
    """Whether this process may compute bfloat16 and int8 products in tiles."""
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "amx-int8")) or platform.system() != "Linux":
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


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _BYTES)


def _emit(builder: Any, name: str, *arguments: Any) -> None:
    kinds = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kinds, f"llvm.x86.{name}"), arguments)  # type: ignore[no-untyped-call]


def _config_operation(name: str) -> Any:
    @intrinsic
    def operation(typing_context: Any, config: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit(builder, name, _address(context, builder, config, arguments[0], _I64(0)))
            return context.get_dummy_value()

        return types.void(config), generate

    return operation


configure = _config_operation("ldtilecfg")
"""Sets up this thread's tiles from 64 bytes."""
keep_configuration = _config_operation("sttilecfg")
"""Writes how this thread's tiles are set up to 64 bytes."""


def _operands(context: Any, builder: Any, array_type: Any, array: Any, index: Any, stride: Any, row: int) -> Any:
    """Address of ``array[index + 16 * row * stride]`` and its stride in bytes, for arrays of four-byte numbers."""
    if row:
        index = builder.add(index, builder.mul(stride, _I64(TILE_ROWS * row)))
    return _address(context, builder, array_type, array, index), builder.mul(stride, _I64(4))


@intrinsic
def clear_block(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Zeroes the block: tiles 0 to 3, two by two, which are 32 rows by 32 columns of four-byte numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for tile in range(4):
            _emit(builder, "tilezero", _I8(tile))
        return context.get_dummy_value()

    return types.void(), generate


def _move(name: str, rows: int) -> Any:
    @intrinsic
    def operation(typing_context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for tile in range(2 * rows):
                offset = _I64(TILE_ROWS * (tile // 2) * BLOCK_COLUMNS + TILE_ROWS * (tile % 2))
                pointer = _address(context, builder, array, arguments[0], builder.add(arguments[1], offset))
                _emit(builder, name, _I8(tile), pointer, _I64(4 * BLOCK_COLUMNS))
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return operation


load_block = _move("tileloadd64", 2), _move("tileloadd64", 1)
"""Reads the block, or its upper half, from ``array[index]`` on, where 32 rows of 32 four-byte numbers lie."""
store_block = _move("tilestored64", 2), _move("tilestored64", 1)
"""Writes it there."""


def _prefetch(builder: Any, address: Any) -> None:
    number = ir.IntType(32)
    kinds = ir.FunctionType(ir.VoidType(), [_BYTES, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    builder.call(function, [address, number(0), number(3), number(1)])


def _multiply(product: str, rows: int) -> Any:
    @intrinsic
    def operation(
        typing_context: Any, a: Any, ai: Any, stride: Any, weights: Any, wi: Any, strip: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a_, ai_, stride_, w_, wi_, strip_ = arguments

            def load_weights(column: int) -> None:
                place = builder.add(wi_, strip_) if column else wi_
                _emit(builder, "tileloadd64", _I8(6 + column), _address(context, builder, weights, w_, place), _I64(64))

            def load_rows(row: int) -> None:
                _emit(builder, "tileloadd64", _I8(4 + row), *_operands(context, builder, a, a_, ai_, stride_, row))
                for line in range(TILE_ROWS):
                    place = builder.add(ai_, builder.mul(stride_, _I64(TILE_ROWS * row + line)))
                    _prefetch(builder, _address(context, builder, a, a_, builder.add(place, _I64(AHEAD))))

            def multiply(row: int, column: int) -> None:
                _emit(builder, product, _I8(2 * row + column), _I8(4 + row), _I8(6 + column))

            # Each load stands where a product can run beside it.
            load_weights(0)
            load_rows(0)
            multiply(0, 0)
            load_weights(1)
            multiply(0, 1)
            for row in range(1, rows):
                load_rows(row)
                multiply(row, 0)
                multiply(row, 1)
            return context.get_dummy_value()

        signature = types.void(a, types.intp, types.intp, weights, types.intp, types.intp)
        return signature, generate

    return operation


multiply_bfloat16 = _multiply("tdpbf16ps", 2), _multiply("tdpbf16ps", 1)
"""Adds to the block, or its upper half, a step of a product: 16 words of each row of ``a`` from word ``ai`` on, times
two packed tiles of weights, at ``wi`` and ``strip`` words behind it. Words are pairs of bfloat16."""
multiply_int8 = _multiply("tdpbusd", 2), _multiply("tdpbusd", 1)
"""The same for words of four unsigned bytes in ``a``, and of four signed ones in the weights."""
