"""Compute threads bound to cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_model import save_tiny_model

from chairlift import config as config_module
from chairlift import cores
from chairlift.cli.cluster import cluster_config
from chairlift.config import ConfigError, EngineConfig
from chairlift.cores import parse_cores
from chairlift.execution.local import LocalExecutor
from chairlift.model.kernels.pool import ComputeThreads

pytestmark = pytest.mark.skipif(not cores.CAN_BIND, reason="only Linux binds threads")
HERE = ",".join(map(str, sorted(cores.ALLOWED)))


@pytest.fixture(autouse=True)
def _unbound() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("6,0-2, 4", (6, 0, 1, 2, 4)),
        ("auto", (0, 1, 2, 3, 4, 6)),
    ],
)
def test_lists(text: str, expected: tuple[int, ...]):
    assert parse_cores(text, {6, 4, 3, 2, 1, 0}) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be auto, or cores such as 0-3,8; got ''"),
        ("0-", "got '0-'"),
        ("-1", "got '-1'"),
        ("0,,1", "got '0,,1'"),
        ("0|1", "got '0\\|1'"),
        ("Auto", "got 'Auto'"),
        ("٣", "got '٣'"),
        ("0-9999999999", "got '0-9999999999'"),
        ("2-1", "2-1 runs backwards"),
        ("0-1,1", "core 1 is named twice"),
        ("3", "no core 3 that this process may use; it may use 0-2,4,6-7"),
        ("0-999999", "no core 3 "),
    ],
)
def test_bad_lists(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        parse_cores(text, {0, 1, 2, 4, 6, 7})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cpu_threads_bind": "all"}, "--cpu-threads-bind all: it must be auto"),
        ({"cpu_threads_bind": "123456"}, "--cpu-threads-bind 123456: there is no core 123456"),
        ({"cpu_threads_bind": "auto", "tensor_parallel_size": 2}, "one rank"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)


def test_more_threads_than_cores_named():
    if len(cores.ALLOWED) < 2:
        pytest.skip("one core")
    with pytest.raises(ConfigError, match="has 1 cores for 2 threads; name as many, or lower --num-threads"):
        EngineConfig(cpu_threads_bind=HERE.split(",")[0], num_threads=2)


def test_a_system_that_binds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_module, "CAN_BIND", False)
    EngineConfig()
    with pytest.raises(ConfigError, match="--cpu-threads-bind needs Linux"):
        EngineConfig(cpu_threads_bind="auto")


def test_a_cluster_has_no_list():
    with pytest.raises(ConfigError, match="--cpu-threads-bind is for one engine"):
        cluster_config({"cluster": "ray", "cpu_threads_bind": "auto", "num_threads": None, "replicas": None,
                        "routing": None, "admin_key": None})  # fmt: skip


def affinities(threads: ComputeThreads) -> list[set[int]]:
    """Of each of the threads, the caller's first."""
    found: dict[int, set[int]] = {}
    everybody = threading.Barrier(threads.count)

    def look(thread: int) -> None:
        found[thread] = os.sched_getaffinity(0)
        everybody.wait()

    threads.run(look)
    return [found[thread] for thread in range(threads.count)]


def test_each_thread_of_an_engine_has_a_core_until_it_is_closed(tmp_path: Path):
    save_tiny_model(tmp_path)
    before = os.sched_getaffinity(0)
    executor = LocalExecutor(
        EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", max_model_len=64, cpu_threads_bind=HERE)
    )
    threads = executor._threads
    assert threads is not None
    assert threads.count == len(before)
    bound = affinities(threads)  # type: ignore[arg-type]
    assert bound[0] == {min(before)}
    assert sorted(map(tuple, bound)) == [(core,) for core in sorted(before)]
    seen: list[set[int]] = []

    def other() -> None:
        cores.unbind()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]
    executor.close()
    assert os.sched_getaffinity(0) == before


def test_a_backend_without_such_threads(tmp_path: Path):
    save_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="attention backend cpu, and this is reference on cpu; leave it out"):
        LocalExecutor(
            EngineConfig(model=str(tmp_path), device="cpu", attention_backend="reference", cpu_threads_bind=HERE)
        )


def test_a_core_that_is_refused_leaves_no_thread_waiting(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError("invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for _ in range(20):  # whichever thread is the first to be refused
        with pytest.raises(OSError, match="invalid argument"):
            cores.bind(ComputeThreads(2), (0, 1))
    monkeypatch.undo()


def test_a_second_engine_has_all_cores_though_the_first_has_bound_its_caller():
    everything = os.sched_getaffinity(0)
    cores.bind(ComputeThreads(1), (min(everything),))
    assert os.sched_getaffinity(0) == {min(everything)}
    assert config_module.available_cores() == len(everything)
    others = affinities(ComputeThreads(2))[1:] if len(everything) > 1 else []
    assert all(other == everything for other in others)
