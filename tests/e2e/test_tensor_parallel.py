"""Ranks under a scheduler that is short of memory, and under a server when one of them is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from support.ranks import rank_pids
from support.server import running_server

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.build import build_executor, build_scheduler
from chairlift.engine.clock import WallClock
from chairlift.engine.core import AddRequest, Command, EngineCore
from chairlift.engine.executor import Executor
from chairlift.execution import tensor_parallel
from chairlift.scheduling.plan import StepRecord

NUM_REQUESTS = 18
SETTINGS = {
    "recompute": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {"preemption_mode": "swap", "enable_prefix_caching": False},
    "swap, prefix cache": {"preemption_mode": "swap", "enable_prefix_caching": True},
}


def requests() -> list[Command]:
    """Prompts that partly begin alike, half greedy and half sampled with a seed."""
    chance = random.Random(5)
    stems = [[chance.randrange(256) for _ in range(40)], []]
    commands: list[Command] = []
    for i in range(NUM_REQUESTS):
        prompt = stems[i % 3 > 0] + [chance.randrange(256) for _ in range(chance.randrange(1, 40))]
        params = SamplingParams(
            temperature=0.9 * (i % 2), top_p=0.95, seed=i, max_tokens=chance.randrange(8, 50), ignore_eos=True
        )
        commands.append(AddRequest(str(i), prompt, params, 0.0))
    return commands


def config(model: Path, ranks: int, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 9,
        "max_model_len": 256,
        "swap_space": 0.01,
        "attention_backend": "reference",
        "tensor_parallel_size": ranks,
    }
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def run(executor: Executor, settings: EngineConfig, num_blocks: int) -> tuple[dict[str, list[int]], list[StepRecord]]:
    """The tokens of every answer, and the record of every step."""
    inbox = requests()

    def drain() -> list[Command]:
        taken = list(inbox)
        inbox.clear()
        return taken

    scheduler = build_scheduler(settings, replace(executor.capacity(), num_blocks=num_blocks))
    core = EngineCore(scheduler, executor, WallClock(), drain)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(NUM_REQUESTS)}
    while inbox or core.has_work:
        for delta in core.step().deltas:
            assert delta.error is None
            tokens[delta.request_id].extend(delta.token_ids)
        core.scheduler.check_integrity()
    return tokens, list(core.step_log.records)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> dict[str, list[int]]:
    """Of one rank with memory for all."""
    settings = config(tiny_model, 1, num_threads=1, enable_prefix_caching=False)
    executor = build_executor(settings)
    tokens, records = run(executor, settings, 190)
    executor.close()
    assert sum(record.preempted for record in records) == 0
    return tokens


@pytest.fixture(scope="module", params=[2, 4])
def ranks(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, Executor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "available_cores", lambda: 4)  # here may be two
        executor = build_executor(config(tiny_model, request.param))
    yield request.param, executor
    executor.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_one_rank_however_short_memory_is(
    tiny_model: Path, undisturbed: dict[str, list[int]], ranks: tuple[int, Executor], name: str
) -> None:
    size, executor = ranks
    tokens, records = run(executor, config(tiny_model, size, **SETTINGS[name]), 16)
    assert tokens == undisturbed
    assert sum(record.preempted for record in records) > 5
    if name == "recompute":
        assert sum(record.rows.recomputed for record in records) > 0
    else:
        assert sum(r.blocks_swapped_in for r in records) == sum(r.blocks_swapped_out for r in records) > 0
    assert (sum(record.cached_tokens for record in records) > 0) == ("prefix" in name)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_killed_under_load_ends_the_engine_with_the_cause(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--dtype", "float32", "--served-model-name", "tiny", "--attention-backend", "reference")
    with running_server(tmp_path / "steps", str(tiny_model), *arguments, "--tensor-parallel-size", "2") as server:
        engine = server.engine_pid
        (rank,) = rank_pids(server.process.pid)
        body = {"model": "tiny", "prompt": [65], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        text = ""
        with httpx.stream("POST", f"{server.api}/completions", json=body, timeout=60) as response:
            for piece in response.iter_text():
                if not text:
                    os.kill(rank, signal.SIGKILL)
                text += piece
        error = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]
        cause = "RankError: rank 1 of 2 ended: killed by signal 9 (SIGKILL)"
        assert error["message"] == f"the engine failed: {cause}"
        health = server.wait_until("ok").json()
        assert (health["engine_restarts"], health["last_failure"]) == (1, cause)
        assert not psutil.pid_exists(engine)
        assert not psutil.pid_exists(rank)

        # Nobody is left behind by an engine that is killed, either.
        (rank,) = rank_pids(server.process.pid)
        os.kill(server.engine_pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while psutil.pid_exists(rank):
            assert time.monotonic() < deadline
            time.sleep(0.02)
