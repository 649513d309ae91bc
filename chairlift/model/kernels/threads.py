"""How the threads of one kernel share its work: they claim pieces from counters, and meet at barriers.

A kernel that runs a whole step has hundreds of stages. To fork and join a thread pool for each would cost more than
many of the stages; two atomic counters do not.

Counters live in an int64 array, each in a cache line of its own, and are zeroed before the kernel starts.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chairlift.model.kernels.compiling import compiled

COUNTER = 8
"""Numbers from one counter to the next: a cache line."""
SPINS = 2000
"""Turns that a thread waits for the others before it lets another process have its core: tens of microseconds. Whom it
waits for may be off its core, and then nothing is gained by holding this one."""

_I64 = ir.IntType(64)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _call(builder: Any, result: Any, name: str) -> None:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, []), name)
    builder.call(function, [])


@intrinsic
def _add(typing_context: Any, counters: Any, index: Any, amount: Any) -> tuple[Any, Callable[..., Any]]:
    """Adds to a counter and returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _address(context, builder, counters, arguments[0], arguments[1])
        return builder.atomic_rmw("add", pointer, arguments[2], "acq_rel")

    return types.int64(counters, types.intp, types.int64), generate


@intrinsic
def _read(typing_context: Any, counters: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, counters, arguments[0], arguments[1]), "acquire", 8)

    return types.int64(counters, types.intp), generate


@intrinsic
def _yield_core(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, ir.IntType(32), "sched_yield")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ticks(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """The processor's clock: it runs evenly, at a rate of its own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter")
        return builder.call(function, [])

    return types.int64(), generate


@compiled
def claim(counters, stage):
    """The next piece of a stage that nobody has taken: 0, 1, 2 and so on, without end. Stage 0 is the barriers' own."""
    return _add(counters, stage * COUNTER, 1)


@compiled
def meet(counters, threads, times):
    """Waits until all threads are here. ``times`` is how often they have met before; returns how often by now."""
    times += 1
    if threads > 1:
        _add(counters, 0, 1)
        spins = 0
        while _read(counters, 0) < threads * times:
            spins += 1
            if spins > SPINS:
                _yield_core()
    return times
