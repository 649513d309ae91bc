"""How the pieces of kernels are compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

SOURCE_DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
"""Numba keys its cache of compiled code by the file that a kernel stands in, and kernels are put together from many.
They capture this, so that a change in any of them compiles them anew."""

COMPILED_ONLY = "only compiled code can call this"

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    # Only other pieces and kernels call a piece, so nothing is made by which Python or C could: that would be a good
    # part of the time that compiling takes.
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a piece of a kernel, for each combination of types that it is called with."""
    return njit(**_OPTIONS)(function)
