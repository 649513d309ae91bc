"""What this machine reaches: its bf16 and int8 matrix peaks and the rate at which it reads memory.

    python benchmarks/machine.py          # a few seconds; a line of JSON

Other benchmarks divide by these, measured in the same run as what they divide, since both drift by the hour on shared
machines.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from chairlift.config import available_cores

# (rows, inner, columns): squares that fit the caches and some that do not, and tall ones as batches of tokens are.
SHAPES = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 2048, 2048),
    (256, 4096, 1024),
    (1024, 576, 3072),
)
READ_BYTES = 1024**3  # beyond any share of a last-level cache that two cores get to themselves
INSTRUCTION_SETS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f", "avx2")


def matrix_peak(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Operations a second (two for each multiply-add) of the quickest of many products, over :data:`SHAPES`.

    Args:
        dtype: of both factors: a floating-point type, or ``torch.int8``, which accumulates in int32.
        seconds: to spend on each shape.
    """
    return max(_product_rate(shape, dtype, seconds) for shape in SHAPES)


def _product_rate(shape: tuple[int, int, int], dtype: torch.dtype, seconds: float) -> float:
    rows, inner, columns = shape
    if dtype == torch.int8:
        product = _int8_product(rows, inner, columns)
    else:
        left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype)

        def product() -> Any:
            return torch.mm(left, right, out=out)

    return 2 * rows * inner * columns / _best_time(product, seconds)


def _int8_product(rows: int, inner: int, columns: int) -> Callable[[], Any]:
    """One product of int8 activations with packed int8 weights, as oneDNN computes a quantized layer."""
    activations = torch.randint(0, 255, (rows, inner), dtype=torch.uint8)
    weights = torch.randint(-127, 127, (columns, inner), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weights, [rows, inner])
    scales, zero_points = torch.ones(columns), torch.zeros(columns, dtype=torch.int64)

    def product() -> Any:
        return torch.ops.onednn.qlinear_pointwise(
            activations, 1.0, 128, packed, scales, zero_points, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    return product


def _best_time(call: Callable[[], Any], seconds: float) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


@numba.njit(parallel=True, cache=True)
def _sum(values: np.ndarray, parts: int) -> int:
    """The sum of ``values`` (int64, [n]), each of ``parts`` equal parts by one thread.

    A thread reads two places at once: with one, prefetchers were seen to leave a quarter of the bandwidth unused, and a
    sum of floats is bound by its additions.
    """
    half = values.size // parts // 2
    totals = np.zeros(parts, dtype=np.int64)
    for part in numba.prange(parts):
        first, second, start = np.int64(0), np.int64(0), 2 * part * half
        for i in range(start, start + half):
            first += values[i]
            second += values[i + half]
        totals[part] = first + second
    return int(totals.sum())


def read_bandwidth(threads: int, seconds: float = 2.0) -> float:
    """Bytes a second that ``threads`` threads read from memory: the quickest of many sums over a large array."""
    values = np.ones(READ_BYTES // 8, dtype=np.int64)
    numba.set_num_threads(threads)
    return float(values.nbytes) / _best_time(lambda: _sum(values, threads), seconds)


def describe() -> dict[str, Any]:
    """The machine in words and figures: CPU, cores that this process may use, memory, instruction sets, versions."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def measure() -> dict[str, float]:
    """Peaks in operations a second and bandwidth in bytes a second, on all cores that this process may use."""
    threads = available_cores()
    torch.set_num_threads(threads)
    return {
        "bf16_peak": matrix_peak(torch.bfloat16, 0.2),
        "int8_peak": matrix_peak(torch.int8, 0.2),
        "read_bandwidth": read_bandwidth(threads, 1.5),
    }


if __name__ == "__main__":
    print(json.dumps({"machine": describe(), "measured": measure()}))
