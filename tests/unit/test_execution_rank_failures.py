"""Executors of several ranks that cannot start, and ranks that are killed, raise or hang."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from support.executing import generate
from support.ranks import enough_cores, rank_config, rank_pids
from support.tiny_model import save_tiny_model

from chairlift.config import ConfigError
from chairlift.execution import other_ranks, tensor_parallel
from chairlift.execution.local import LocalExecutor
from chairlift.execution.other_ranks import OtherRanks, RankError
from chairlift.execution.tensor_parallel import TensorParallelExecutor
from chairlift.scheduling.plan import RowCounts, StepPlan

PROMPTS = [[65, 66, 67], [70]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def _cores() -> Iterator[None]:
    with enough_cores():
        yield


def test_memory_is_shared_by_all_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kv_cache_memory_bytes": 20 * 512 * 16 + 100, "max_model_len": 300, "swap_space": 7 * 512 * 16 / 2**30}
    assert LocalExecutor(rank_config(model, num_threads=1, **settings)).capacity().num_blocks == 20
    started = TensorParallelExecutor(rank_config(model, tensor_parallel_size=2, **settings))
    assert (started.capacity().num_blocks, started.capacity().num_host_blocks) == (20, 7)
    started.close()
    monkeypatch.setattr(tensor_parallel, "available_host_memory", lambda: 10 * 2**20)
    with pytest.raises(ConfigError, match=r"5% of 10\.4 MiB on the CPU, less 0\.4 MiB .*raise --gpu-memory-util"):
        TensorParallelExecutor(rank_config(model, tensor_parallel_size=2, gpu_memory_utilization=0.05))
    assert not rank_pids()
    assert not torch.distributed.is_initialized()


def test_a_rank_that_is_killed_is_noticed_at_once(model: Path) -> None:
    told: queue.Queue[RankError] = queue.Queue()
    executor = TensorParallelExecutor(rank_config(model, tensor_parallel_size=2), told.put)
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    message = "rank 1 of 2 ended: killed by signal 9 (SIGKILL)"
    assert str(told.get(timeout=30)) == message
    with pytest.raises(RankError) as raised:
        generate(executor, PROMPTS, 2)
    assert str(raised.value) == message
    with pytest.raises(RankError, match=r"out of step: an earlier step ended in its middle \(RankError: rank 1 of 2"):
        generate(executor, PROMPTS, 2)
    executor.close()
    assert not rank_pids()
    assert told.empty()


def test_a_rank_that_raises_says_so_and_where(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: queue.Queue[RankError] = queue.Queue()
    executor = TensorParallelExecutor(rank_config(model, tensor_parallel_size=2, swap_space=0.0), told.put)
    executor._others.send(StepPlan(7, [], RowCounts(), swap_out=[(0, 0)]))  # to them alone
    assert str(told.get(timeout=30)) == ("rank 1 of 2 ended: RuntimeError: step 7 swaps, but there is no swap space")
    executor.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "in _swap" in record.getMessage()
    assert not rank_pids()


def test_a_rank_that_hangs_is_named(model: Path) -> None:
    told: queue.Queue[RankError] = queue.Queue()
    executor = TensorParallelExecutor(rank_config(model, tensor_parallel_size=3, step_timeout=4.0), told.put)
    expected = generate(executor, PROMPTS, 2)
    assert generate(executor, PROMPTS, 2) == expected
    hanging = rank_pids()[1]
    os.kill(hanging, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"^rank 2 of 3 gave no answer: it hangs, or is far behind the others \("):
        generate(executor, PROMPTS, 2)
    executor.close()
    assert not psutil.pid_exists(hanging)
    assert not rank_pids()
    assert told.empty()  # none has ended but by what was found here


BEGINNING = "from chairlift.execution.rank import Failure; from multiprocessing.connection import Connection; "


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("raise SystemExit(3)", RankError, "^rank 1 of 2 ended: exit status 3$"),
        ("import os; os.abort()", RankError, r"^rank 1 of 2 ended: killed by signal 6 \(SIGABRT\)$"),
        (
            BEGINNING + "Connection({descriptor}).send(Failure('change this', expected=True))",
            ConfigError,
            "^change this$",
        ),
    ],
)
def test_a_rank_that_cannot_begin(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    error: type[Exception],
    message: str,
    at_once: bool,
) -> None:
    monkeypatch.setattr(other_ranks, "COMMAND", command)
    if at_once:
        assign = OtherRanks.assign

        def assign_late(others: OtherRanks, messages: Sequence[object]) -> None:
            others._ranks[0].process.wait(30)
            assign(others, messages)

        monkeypatch.setattr(OtherRanks, "assign", assign_late)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(error, match=message):
        TensorParallelExecutor(rank_config(model, tensor_parallel_size=2))
    assert psutil.Process().children(recursive=True) == before
