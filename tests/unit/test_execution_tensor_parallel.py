"""Executors of several ranks: the same answers as of one, and what becomes of them when a rank fails.

Processes that import torch take seconds to start, so most tests share two executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.executing import generate, with_seeds
from support.ranks import enough_cores, rank_config, rank_pids
from support.tiny_model import save_tiny_model

from chairlift.config import ConfigError
from chairlift.execution import tensor_parallel
from chairlift.execution.local import LocalExecutor
from chairlift.execution.setup import Setup
from chairlift.execution.tensor_parallel import TensorParallelExecutor
from chairlift.scheduling.plan import PromptTargets, RowCounts, SequenceChunk, SequenceContext, StepPlan, StepResult
from chairlift.scheduling.sampling_params import SamplingParams

PROMPTS = [[(7 * i * i + 3 * i + n) % 256 for i in range(n)] for n in (1, 5, 16, 33, 70)]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def _cores() -> Iterator[None]:
    with enough_cores():
        yield


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(rank_config(model, num_threads=1))
    yield executor
    executor.close()


@pytest.fixture(scope="module", params=[2, 4])
def several(model: Path, request: pytest.FixtureRequest) -> Iterator[TensorParallelExecutor]:
    executor = TensorParallelExecutor(rank_config(model, tensor_parallel_size=request.param))
    yield executor
    pids = rank_pids()
    assert len(pids) == request.param - 1
    executor.close()
    executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute(StepPlan(0, [], RowCounts()))


def test_same_tokens_however_batched(one: LocalExecutor, several: TensorParallelExecutor) -> None:
    expected = generate(one, PROMPTS, NUM_TOKENS)
    for chunk in (7, 1000):
        assert generate(several, PROMPTS, NUM_TOKENS, chunk=chunk) == expected


def test_same_draws(one: LocalExecutor, several: TensorParallelExecutor) -> None:
    seeded = with_seeds(SamplingParams(temperature=0.8, top_p=0.9), len(PROMPTS))
    drawn = generate(several, PROMPTS, NUM_TOKENS, params=seeded)
    assert drawn == generate(one, PROMPTS, NUM_TOKENS, params=seeded) != generate(one, PROMPTS, NUM_TOKENS)


def test_what_only_rank_0_needs_of_a_plan(one: LocalExecutor, several: TensorParallelExecutor) -> None:
    """Masks, penalties and logprobs, some of which could not even be sent, and rows that are looked up in a prompt."""
    prompt = PROMPTS[2]
    params = SamplingParams(temperature=0, seed=0, logprobs=3, presence_penalty=1.5, repetition_penalty=1.2)
    allowed = memoryview(bytes([0b10101010]) * 33)
    plan = StepPlan(
        5,
        [
            SequenceChunk(
                "a",
                prompt,
                0,
                [3],
                params,
                context=SequenceContext(prompt, len(prompt), frozenset({257})),
                prompt_targets=PromptTargets(2, 0, prompt[1:]),
                allowed=allowed,
            ),
            SequenceChunk("b", PROMPTS[1], 0, [4, 5], None, prompt_targets=PromptTargets(0, 1, PROMPTS[1][2:])),
        ],
        RowCounts(),
    )
    here, there = one.execute(plan), several.execute(plan)
    assert here.token_ids == there.token_ids
    assert here.token_ids[0] % 2 == 1
    for ours, theirs in zip(scores(there), scores(here), strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        assert ours[1] == pytest.approx(theirs[1], abs=1e-4)


def scores(result: StepResult) -> list[tuple[int, float, int]]:
    every = [*result.logprobs, *result.prompt_logprobs["a"], *result.prompt_logprobs["b"]]
    assert len(every) == 1 + len(PROMPTS[2]) - 1 + len(PROMPTS[1]) - 2
    return [(score.token_id, score.logprob, score.rank) for score in every if score is not None]


def test_swapped_blocks_come_back_on_every_rank(one: LocalExecutor, several: TensorParallelExecutor) -> None:
    prompt = PROMPTS[4]
    table = [5, 2, 9, 0, 7]
    first = StepPlan(0, [SequenceChunk("a", prompt, 0, table, GREEDY)], RowCounts())
    answers = []
    for executor in (one, several):
        (token,) = executor.execute(first).token_ids
        away = StepPlan(1, [], RowCounts(), swap_out=[(block, i) for i, block in enumerate(table)])
        executor.execute(away)
        # Somebody else's keys and values take their place.
        executor.execute(StepPlan(2, [SequenceChunk("b", [9] * 80, 0, table, GREEDY)], RowCounts()))
        back = [11, 12, 13, 14, 15]
        plan = StepPlan(
            3,
            [SequenceChunk("a", [token], len(prompt), back, GREEDY)],
            RowCounts(),
            swap_in=[(i, block) for i, block in enumerate(back)],
        )
        answers.append([token, *executor.execute(plan).token_ids])
    assert answers[0] == answers[1]


def test_each_rank_holds_its_part(one: LocalExecutor, several: TensorParallelExecutor) -> None:
    size = len(several.holdings)
    whole, parts, capacity = one.capacity(), several.holdings, several.capacity()
    # Norms are held by all, and with more ranks than key/value heads these by several.
    for part in parts:
        assert whole.weight_bytes / size <= part.weights <= whole.weight_bytes / size * (1.02 if size == 2 else 1.1)
    assert capacity.weight_bytes == sum(part.weights for part in parts)
    assert [part.kv_per_token for part in parts] == [whole.kv_bytes_per_token // 2] * size
    assert capacity.kv_bytes_per_token == sum(part.kv_per_token for part in parts)
    assert (capacity.num_blocks, capacity.num_host_blocks) == (whole.num_blocks, whole.num_host_blocks)
    assert capacity.device == f"{size} × cpu"


def test_there_is_one_in_a_process(model: Path, one: LocalExecutor, several: TensorParallelExecutor) -> None:
    before = rank_pids()
    with pytest.raises(ConfigError, match=r"is in a torch\.distributed group already"):
        TensorParallelExecutor(rank_config(model, tensor_parallel_size=2))
    assert rank_pids() == before
    assert generate(several, PROMPTS[:2], 2) == generate(one, PROMPTS[:2], 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 5}, "5 is more than the model's 4 query heads, .* use 4 or less"),
        ({"tensor_parallel_size": 3, "cores": 2}, "3 is more than the 2 cores that this process may use, .*use 2 or"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, "2 is more than the 1 threads of --num-threads, .*use 1 or"),
    ],
)
def test_sizes_that_cannot_work(
    model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    if cores := settings.pop("cores", None):
        monkeypatch.setattr(tensor_parallel, "available_cores", lambda: cores)
    before = rank_pids()
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {message}"):
        TensorParallelExecutor(rank_config(model, **settings))
    assert rank_pids() == before


def test_gpus_that_are_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(Setup.of(rank_config(model)), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs as many GPUs, and torch sees 1 here; use 1"):
        tensor_parallel._threads(setup, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert tensor_parallel._threads(setup, 8) == [1] * 8  # of the CPU, which computes nothing then


def test_threads_are_divided(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup.of(rank_config(model))
    monkeypatch.setattr(tensor_parallel, "available_cores", lambda: 7)
    assert sorted(tensor_parallel._threads(setup, 3)) == [2, 2, 3]
    assert tensor_parallel._threads(setup, 7) == [1] * 7
