"""Settings that cannot work are refused, by the name of the flag that has to change."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.config import ConfigError, EngineConfig, ServerConfig

NAN, INF = float("nan"), float("inf")
COUNTS = (
    "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_threads",
    "max_num_partial_prefills", "long_prefill_token_threshold", "static_batch_size",
    "tensor_parallel_size",
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


def test_int8_is_for_one_rank() -> None:
    EngineConfig(quantization="int8", tensor_parallel_size=1)
    EngineConfig(tensor_parallel_size=64)
    with pytest.raises(ConfigError, match="--quantization int8 runs on one rank alone; leave it out, or use"):
        EngineConfig(quantization="int8", tensor_parallel_size=2)


def test_the_edges_are_accepted() -> None:
    EngineConfig(**dict.fromkeys(COUNTS, 1), swap_space=0, static_batch_timeout=0, gpu_memory_utilization=1)  # type: ignore[arg-type]
    EngineConfig(swap_space=100_000, kv_cache_memory_bytes=2**60, step_timeout=86_400)


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.config.available_cores", lambda: 4)
    EngineConfig(num_threads=4)
    with pytest.raises(ConfigError, match=r"--num-threads 5 is more than the 4 cores .* give 4 or less"):
        EngineConfig(num_threads=5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"api_keys": ("a", "")}, "--api-key must not be empty"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile too"),
        ({"ssl_certfile": "c"}, "--ssl-certfile needs --ssl-keyfile too"),
        ({"ssl_ca_certs": "a"}, "--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile"),
        ({"ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"root_path": "llm"}, "--root-path must begin"),
        ({"root_path": "/llm/"}, "--root-path must begin"),
        ({"allow_credentials": True}, "--allow-credentials needs --allowed-origins that are named"),
        (
            {"allow_credentials": True, "allowed_origins": ("*",)},
            "--allow-credentials needs --allowed-origins that are named",
        ),
        ({"otlp_traces_endpoint": "localhost:4317"}, "--otlp-traces-endpoint must be the URL"),
        ({"max_body_size": 0}, "--max-body-size must be a whole number from 1"),
        ({"max_num_queued_reqs": -1}, "--max-num-queued-reqs must be from 0"),
        ({"log_format": "xml"}, "--log-format must be one of text, json"),
        ({"log_level": "loud"}, "--log-level must be one of"),
        *(({"request_timeout": value}, "--request-timeout must be above 0") for value in (0, -1, NAN, INF)),
        *(({"shutdown_timeout": value}, "--shutdown-timeout must be from 0") for value in (-1, NAN, INF)),
    ],
)
def test_servers_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        ServerConfig(**settings)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
