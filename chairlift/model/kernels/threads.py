"""How the threads of one kernel share its work: they claim pieces from counters, and meet at barriers.

A kernel that runs a whole step has hundreds of stages. To fork and join a thread pool for each would cost more than
many of the stages; two atomic counters do not.

Counters live in an int64 array, each in a cache line of its own, and are zeroed before the kernel starts.
"""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from chairlift.model.kernels.compiling import compiled

COUNTER = 8
"""Numbers from one counter to the next: a cache line."""
ARRIVED, SLEEPERS = 0, 1
"""The first counter's line has how often threads have come to a meeting, and how many of them sleep there."""
SPINS = 60000
"""Turns that a thread waits for the others before it sleeps: about a hundred microseconds. Whom it waits for may be off
its core. To spin on would keep that one off it, where others use the cores too; to yield would cost a time slice at
each meeting; a thread that is woken from sleep is run soon.

It has to be several times as long as waking takes (20 to 30 microseconds on a virtual machine). If it is shorter, one
sleep brings about the next: who wakes a thread is at the next meeting long before it, and sleeps there in its turn.
Every meeting took 25 microseconds then rather than a tenth of one, which was a fourth of a step."""

# The sleeping and waking of Linux, futex(2), by its number on this processor; elsewhere threads yield.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None
_FUTEX_WAIT, _FUTEX_WAKE, _PRIVATE = 0, 1, 128
_EVERYBODY = 2**31 - 1

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


def _futex(context: Any, builder: Any, address: Any, operation: int, value: Any) -> None:
    """Sleeps or wakes by the low half of a counter."""
    if _SYS_FUTEX is None:
        _call(builder, ir.IntType(32), "sched_yield")
        return
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    nothing = _I64(0)
    builder.call(function, [_I64(_SYS_FUTEX), address, _I64(operation | _PRIVATE), value, nothing, nothing, nothing])


@intrinsic
def _sleep(typing_context: Any, counters: Any, index: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """Sleeps until somebody wakes those who wait for a counter, unless it is no longer ``value``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, counters, arguments[0], arguments[1])
        _futex(context, builder, address, _FUTEX_WAIT, arguments[2])
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), generate


@intrinsic
def _wake(typing_context: Any, counters: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Wakes all who sleep until a counter changes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, counters, arguments[0], arguments[1])
        _futex(context, builder, address, _FUTEX_WAKE, _I64(_EVERYBODY))
        return context.get_dummy_value()

    return types.void(counters, types.intp), generate


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
def arrive(counters, everybody):
    """Says that a thread has come to a meeting. Returns whether all have: ``everybody`` is how often by then."""
    if _add(counters, ARRIVED, 1) + 1 < everybody:
        return False
    # Whoever sleeps, or is about to, has said so before it looked at the counter for the last time.
    if _read(counters, SLEEPERS) > 0:
        _wake(counters, ARRIVED)
    return True


@compiled
def all_here(counters, everybody):
    """Whether all threads have come."""
    return _read(counters, ARRIVED) >= everybody


@compiled
def await_all(counters, everybody):
    """Waits until all threads have come."""
    for _ in range(SPINS):
        if all_here(counters, everybody):
            return
    _add(counters, SLEEPERS, 1)
    arrived = _read(counters, ARRIVED)
    while arrived < everybody:
        _sleep(counters, ARRIVED, arrived)
        arrived = _read(counters, ARRIVED)
    _add(counters, SLEEPERS, -1)


@compiled
def meet(counters, threads, times):
    """Waits until all threads are here. ``times`` is how often they have met before; returns how often by now."""
    times += 1
    if threads > 1 and not arrive(counters, threads * times):
        await_all(counters, threads * times)
    return times
