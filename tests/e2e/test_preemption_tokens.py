"""However short memory is, and whatever is done about it, an answer is the same to the token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams

NUM_REQUESTS = 100
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens × layers × (key, value) × heads × width × fp32
STEMS = [
    "A chairlift never stops to fill up: each chair takes the next skier the moment it comes round empty. ",
    "Static batching waits for the slowest. ",
    "",
]


def workload() -> tuple[list[str], list[SamplingParams]]:
    """Prompts of every length that partly begin alike, half greedy and half sampled with a seed."""
    chance = random.Random(11)
    prompts, params = [], []
    for i in range(NUM_REQUESTS):
        tail = "".join(chance.choice("abcdefgh ") for _ in range(chance.randrange(1, 120)))
        prompts.append(chance.choice(STEMS) + tail)
        sampling: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": i}
        params.append(SamplingParams(max_tokens=chance.randrange(8, 120), ignore_eos=True, **sampling))
    return prompts, params


def run(model: Path, num_blocks: int, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """The tokens of every answer, and the record of every step."""
    prompts, params = workload()
    with LLM(
        str(model),
        dtype="float32",
        num_threads=1,
        max_num_seqs=16,
        max_model_len=400,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
        **options,
    ) as llm:
        assert llm.core.executor.capacity().num_blocks == num_blocks
        outputs = llm.generate(prompts, params)
        llm.core.scheduler.check_integrity()
        assert llm.core.scheduler.kv.num_used_blocks == 0
        return [output.outputs[0].token_ids for output in outputs], list(llm.core.step_log.records)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[list[int]]:
    """With memory for all: nobody is ever put aside."""
    tokens, records = run(tiny_model, 400, enable_prefix_caching=False)
    assert sum(record.preempted for record in records) == 0
    return tokens


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("victim", ["latest", "least-work"])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_tokens_do_not_depend_on_preemption(
    tiny_model: Path, undisturbed: list[list[int]], mode: str, victim: str, prefix_caching: bool
):
    tokens, records = run(
        tiny_model,
        30,  # of which one request may need up to 21
        preemption_mode=mode,
        preemption_victim=victim,
        enable_prefix_caching=prefix_caching,
        swap_space=0.0 if mode == "recompute" else 0.01,
    )
    assert tokens == undisturbed
    assert sum(record.preempted for record in records) > NUM_REQUESTS / 2
    swapped_out = sum(record.blocks_swapped_out for record in records)
    if mode == "recompute":
        assert swapped_out == 0
        assert sum(record.rows.recomputed for record in records) > 0
    if mode == "swap":
        assert swapped_out == sum(record.blocks_swapped_in for record in records) > 0
    assert (sum(record.cached_tokens for record in records) > 0) == prefix_caching


def test_undisturbed_with_prefix_cache(tiny_model: Path, undisturbed: list[list[int]]):
    tokens, records = run(tiny_model, 400, enable_prefix_caching=True)
    assert tokens == undisturbed
    assert sum(record.cached_tokens for record in records) > 0


def test_static_batches_give_the_same_tokens_too(tiny_model: Path, undisturbed: list[list[int]]):
    tokens, records = run(tiny_model, 400, batching="static", static_batch_size=8, static_batch_timeout=0.0)
    assert tokens == undisturbed
    assert sum(record.rows.ended for record in records) > 0
