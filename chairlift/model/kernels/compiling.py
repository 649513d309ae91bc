"""How kernels and their pieces are compiled."""

from __future__ import annotations

from typing import Any

from numba import njit

# A piece is only called by other pieces and kernels, so nothing is made by which Python or C could call it: that would
# be a good part of the time that compiling takes.
compiled: Any = njit(nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Compiles a piece of a kernel."""
