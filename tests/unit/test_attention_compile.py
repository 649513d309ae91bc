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


STALE = """
from chairlift.model.kernels.compiling import SOURCE_DIGEST
from chairlift.model.kernels.work_plan import plan_work
print(SOURCE_DIGEST[:16] in plan_work._cache._impl.filename_base)
"""


def test_code_kept_of_another_version_is_not_even_read() -> None:
    """It holds types by name, which this version may not have."""
    assert run(STALE) == "True"
