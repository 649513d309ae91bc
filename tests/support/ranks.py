"""What tests of executors of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from chairlift.config import EngineConfig
from chairlift.execution import tensor_parallel

# More ranks than cores are refused, and here may be two.
CORES = 4


@contextmanager
def enough_cores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "available_cores", lambda: CORES)
        yield


def rank_config(model: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "max_model_len": 128,
        "swap_space": 0.01,
        # Nothing to compile.
        "attention_backend": "reference",
    }
    return EngineConfig(model=str(model), **{**defaults, **settings})


def rank_pids(pid: int | None = None) -> list[int]:
    """Of the ranks beside rank 0 that run under a process, by default this one."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if "chairlift.execution.rank" in " ".join(child.cmdline())]
