"""100 real requests on a real model: the same tokens in fp32 however short memory is and whatever is done about it.

    python benchmarks/preemption_tokens.py

Half of the requests are greedy, half sampled with a seed. They run once with memory for all, and then on a KV cache so
small that most are put aside, under every preemption mode, with prefix caching on and off. Exits with 1 if any token
differs. (The suite does the same on a tiny model, tests/e2e/test_preemption_tokens.py.)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams

REQUESTS = Path(__file__).parent / "data" / "requests.json"
COUNT, MAX_MODEL_LEN, MAX_NUM_SEQS = 100, 256, 16
ENOUGH, SHORT = 256, 40  # blocks of 16 tokens
BLOCK_BYTES = 16 * 2 * 30 * 3 * 64 * 4  # tokens × (key, value) × layers × heads × width × fp32, of SmolLM2-135M


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Cuts of the request set's prompts, of 5 to 64 tokens, some of which begin alike; 16 to 79 new tokens."""
    requests = json.loads(REQUESTS.read_text())["reqs"]
    prompts = [requests[i % 50]["prompt"][: 5 + 7 * i % 60] for i in range(COUNT)]
    params = [
        SamplingParams(
            max_tokens=16 + 13 * i % 64, temperature=0.0 if i % 2 else 0.8, top_p=0.95, seed=i, ignore_eos=True
        )
        for i in range(COUNT)
    ]
    return prompts, params


def run(num_blocks: int, **options: Any) -> tuple[list[list[int]], int, int]:
    """Every answer's tokens, how often a request was put aside, and how many different ones were."""
    prompts, params = workload()
    with LLM(
        "smollm2",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
        **options,
    ) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        llm.core.scheduler.check_integrity()
    preemptions = [output.timing.preemptions for output in outputs if output.timing is not None]
    return [output.token_ids for output in outputs], sum(preemptions), sum(count > 0 for count in preemptions)


def main() -> None:
    expected, aside, _ = run(ENOUGH, enable_prefix_caching=False)
    print(f"memory for all: {sum(map(len, expected)):,} tokens, {aside} put aside")
    wrong = 0
    for caching in (False, True):
        for mode in ("recompute", "swap", "auto"):
            started = time.perf_counter()
            swap_space = 0.0 if mode == "recompute" else 1.0
            tokens, aside, requests = run(
                SHORT, preemption_mode=mode, swap_space=swap_space, enable_prefix_caching=caching
            )
            different = sum(a != b for a, b in zip(tokens, expected, strict=True))
            wrong += different
            print(
                f"{mode:10} prefix cache {'on ' if caching else 'off'}: {requests} of {COUNT} requests put aside, "
                f"{aside} times; {different} answers differ ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
