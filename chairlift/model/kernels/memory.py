"""Memory that begins where a cache line does.

A vector or a row of a tile that lies across two lines is loaded as two, and NumPy's own large arrays begin 16 bytes
into a line: products in tiles took more than twice as long with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.model.kernels.compiling import compiled

CACHE_LINE = 64


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


@compiled
def aligned_floats(size: int) -> Any:
    """The same of float32, for kernels."""
    memory = np.empty(size + CACHE_LINE // 4, np.float32)
    first = (-memory.ctypes.data % CACHE_LINE) // 4
    return memory[first : first + size]
