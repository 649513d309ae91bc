"""An int8 KV cache in two parts: each rank rounds its heads as one rank alone would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.ranks import enough_cores, rank_config
from support.tiny_model import save_tiny_model

from chairlift.engine.executor import Executor
from chairlift.execution.local import LocalExecutor
from chairlift.execution.tensor_parallel import TensorParallelExecutor
from chairlift.scheduling.plan import PromptTargets, RowCounts, SequenceChunk, StepPlan

TEXT = [(7 * i * i + 3 * i) % 256 for i in range(72)]
WHOLE, CHUNKS = (71,), (33, 36, 1, 1)
TABLES = [5, 2, 9, 0, 7], [11, 12, 3, 4, 8]
HOST = range(5)


@pytest.fixture(scope="module", autouse=True)
def _cores() -> Iterator[None]:
    with enough_cores():
        yield


def logprobs(executor: Executor, chunks: Sequence[int]) -> list[float]:
    """Of every token of the text after its first. Before each chunk the blocks go to the host, and back elsewhere."""
    assert sum(chunks) == len(TEXT) - 1
    scores, start = [], 0
    for step, size in enumerate(chunks):
        here, there = TABLES[step % 2], TABLES[1 - step % 2]
        executor.execute(StepPlan(2 * step, [], RowCounts(), swap_out=[*zip(here, HOST, strict=True)]))
        targets = PromptTargets(0, 0, TEXT[start + 1 : start + size + 1])
        chunk = SequenceChunk("a", TEXT[start : start + size], start, there, None, prompt_targets=targets)
        swap_in = [*zip(HOST, there, strict=True)]
        result = executor.execute(StepPlan(2 * step + 1, [chunk], RowCounts(), swap_in=swap_in))
        scores += [score.logprob for score in result.prompt_logprobs["a"] if score is not None]
        start += size
    return scores


def test_two_ranks_score_a_text_as_one_does(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    exact = logprobs(LocalExecutor(rank_config(tmp_path, num_threads=1)), WHOLE)
    one = LocalExecutor(rank_config(tmp_path, num_threads=1, kv_cache_dtype="int8"))
    alone = logprobs(one, WHOLE)  # so that nothing is moved that was written before
    two = TensorParallelExecutor(rank_config(tmp_path, tensor_parallel_size=2, kv_cache_dtype="int8"))
    try:
        together = logprobs(two, CHUNKS)
        # A byte for each number of the one head that a rank has, and a scale for its keys as for its values.
        assert [part.kv_per_token for part in two.holdings] == [2 * 2 * 1 * (16 + 4)] * 2
        assert two.capacity().kv_bytes_per_token == one.capacity().kv_bytes_per_token
    finally:
        two.close()
    assert len(together) == len(TEXT) - 1
    # Not the same to the last bit: another order of sums may push a number over the edge at which it is rounded.
    assert together == pytest.approx(alone, abs=2e-3)
    assert alone != pytest.approx(exact, abs=0.1), "an int8 cache costs far more than that"
