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
"""Of all that kernels are put together from."""

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


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles what Python calls, and keeps the code on disk, where there is a folder to write to.

    Numba finds what it has kept by the function's name, file and line, and reads it before it looks which version it is
    of: types in there that are gone by now would be an error. So the digest of the source goes into the name.
    """
    function.__qualname__ += f"_{SOURCE_DIGEST[:16]}"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        # No folder can be written to: every start compiles anew.
        return njit(**options)(function)
