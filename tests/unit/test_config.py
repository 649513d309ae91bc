"""Settings that cannot work are refused, by the name of the flag that has to change."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.config import ConfigError, EngineConfig

NAN, INF = float("nan"), float("inf")
COUNTS = (
    "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_threads",
    "max_num_partial_prefills", "long_prefill_token_threshold", "static_batch_size",
)  # fmt: skip


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 10**20, 1.5, NAN])
def test_counts(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')} must be a whole number from 1 to "):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("gpu_memory_utilization", (0, -1, 1.1, NAN, INF)),
        ("swap_space", (-1, NAN, INF, 1e300)),
        ("static_batch_timeout", (-1, NAN, INF, 1e300)),
        ("step_timeout", (0, -1, NAN, INF, 1e300)),
        ("block_size", (3, 24)),
    ],
)
def test_quantities(field: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')} must be "):
            EngineConfig(**{field: value})


def test_more_threads_than_any_machine_has() -> None:
    with pytest.raises(ConfigError, match=r"^--num-threads must be a whole number from 1 to 1024"):
        EngineConfig(num_threads=100_000)


def test_a_step_too_small_for_its_sequences() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens \(4\) must be at least --max-num-seqs \(8\)"):
        EngineConfig(max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ConfigError, match="--swap-space"):
        EngineConfig(preemption_mode="swap")


def test_the_edges_are_accepted() -> None:
    EngineConfig(**dict.fromkeys(COUNTS, 1), swap_space=0, static_batch_timeout=0, gpu_memory_utilization=1)  # type: ignore[arg-type]
    EngineConfig(swap_space=100_000, kv_cache_memory_bytes=2**60, step_timeout=86_400)
