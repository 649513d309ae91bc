"""The compiled kernel's surroundings."""

from __future__ import annotations

import subprocess
import sys

NO_FOLDER = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from chairlift.model.kernels.paged_attention import paged_attention
print(type(paged_attention._cache).__name__)
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_a_folder_to_write_to_the_kernel_is_not_cached() -> None:
    assert run(NO_FOLDER) == "NullCache"
