"""The compiled kernel's surroundings: no folder for compiled code, no OpenMP library. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

NO_FOLDER = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from chairlift.model.kernels.paged_attention import paged_attention
print(type(paged_attention._cache).__name__)
"""

NO_OPENMP = """
import sys
sys.modules["numba.np.ufunc.omppool"] = None
import numba
import torch
from support.paged_batch import Heads, paged_batch
from chairlift.model.attention.cpu import CpuAttention
torch.set_num_threads(1)
output, _ = paged_batch(Heads(), [(2, 3)]).run(Heads().backend(CpuAttention))
assert torch.isfinite(output).all()
print(numba.threading_layer())
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_a_folder_to_write_to_the_kernel_is_not_cached() -> None:
    assert run(NO_FOLDER) == "NullCache"


def test_without_openmp_numba_brings_its_own_threads() -> None:
    assert run(NO_OPENMP) == "workqueue"
