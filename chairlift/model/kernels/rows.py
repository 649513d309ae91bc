"""What happens to a row of activations between two products."""

# ruff: noqa: ARG001 -- Numba looks at the parameters' number and names.

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from chairlift.model.kernels.compiling import COMPILED_ONLY, compiled
from chairlift.model.kernels.kinds import is_quantized
from chairlift.model.kernels.simd import (
    LANES,
    divide,
    exp2,
    fma,
    largest,
    load,
    maximum,
    minimum,
    splat,
    store,
    store_uint8,
    total,
)

LOG2_E = np.float32(1.4426950408889634)
# Beyond this 2^x is no float32 any more, and 1 + 2^x long as good as 2^x.
EXP2_MAX = np.float32(126)
INT8_MAX = 127
TINY = np.float32(1e-30)


@compiled
def embed(token: int, embedding: Any, x: Any, xi: int, size: int) -> None:
    """Copies a token's embedding to ``x[xi:xi + size]``."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    for i in range(0, size, LANES):
        store(x, xi + i, fma(load(embedding, token * size + i), one, zero))


@compiled
def normalize(x: Any, xi: int, weight: Any, wi: int, size: int, eps: float, row: Any, ri: int) -> None:
    """RMSNorm (arXiv:1910.07467) of ``size`` numbers, in float32, into ``row[ri:ri + size]``."""
    zero = splat(np.float32(0))
    squares = zero
    for i in range(0, size, LANES):
        lanes = load(x, xi + i)
        squares = fma(lanes, lanes, squares)
    factor = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, LANES):
        store(row, ri + i, fma(fma(load(x, xi + i), factor, zero), load(weight, wi + i), zero))


@compiled
def int8_scale(source: Any, si: int, size: int) -> Any:
    """What one step of int8 is to be worth, so that the largest of the numbers is 127; NaN if one is not finite."""
    zero, minus = splat(np.float32(0)), splat(np.float32(-1))
    peak, nothing = splat(TINY), zero
    for i in range(0, size, LANES):
        lanes = load(source, si + i)
        peak = maximum(peak, maximum(lanes, fma(lanes, minus, zero)))
        nothing = fma(lanes, zero, nothing)
    return largest(peak) / np.float32(INT8_MAX) + total(nothing)


def write_row(kind, source, si, size, activations, ai, scales, row):  # pragma: no cover
    """Writes float32 numbers as a product takes them; int8 is scaled by the row's largest number."""
    raise TypeError(COMPILED_ONLY)


@overload(write_row)
def _write_row(kind, source, si, size, activations, ai, scales, row):
    def rounded(kind, source, si, size, activations, ai, scales, row):
        zero, one = splat(np.float32(0)), splat(np.float32(1))
        for i in range(0, size, LANES):
            store(activations, ai + i, fma(load(source, si + i), one, zero))

    def quantized(kind, source, si, size, activations, ai, scales, row):
        scale, zero = int8_scale(source, si, size), splat(np.float32(0))
        scales[row] = scale
        factor = splat(np.float32(1) / scale)
        for i in range(0, size, LANES):
            store_uint8(activations, ai + i, fma(load(source, si + i), factor, zero))

    return quantized if is_quantized(kind) else rounded


@compiled
def gated(gate: Any, up: Any) -> Any:
    """SiLU of one vector times the other (SwiGLU, arXiv:2002.05202)."""
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    power = minimum(fma(gate, splat(-LOG2_E), zero), splat(EXP2_MAX))
    return divide(fma(gate, up, zero), fma(exp2(power), one, one))


@compiled
def rotate(row: Any, first: int, half: int, cos: Any, sin: Any, ai: int) -> None:
    """Rotates a head of ``2 * half`` numbers in place (RoPE, arXiv:2104.09864), its halves against each other."""
    zero, minus = splat(np.float32(0)), splat(np.float32(-1))
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        a, b = load(row, first + i), load(row, first + half + i)
        c, s = load(cos, ai + i), load(sin, ai + i)
        store(row, first + i, fma(a, c, fma(fma(b, s, zero), minus, zero)))
        store(row, first + half + i, fma(b, c, fma(a, s, zero)))
    for i in range(whole, half):
        x, y = row[first + i], row[first + half + i]
        row[first + i] = x * cos[ai + i] - y * sin[ai + i]
        row[first + half + i] = y * cos[ai + i] + x * sin[ai + i]
