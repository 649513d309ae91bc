"""100 real requests on a real model: the same tokens in fp32 however short memory is and whatever is done about it.

    python benchmarks/preemption_tokens.py
    python benchmarks/preemption_tokens.py --tensor-parallel-size 2 --count 12 --blocks 16

Half of the requests are greedy, half sampled with a seed. They run once with memory for all, and then on a KV cache so
small that most are put aside, under every preemption mode, with prefix caching on and off. Exits with 1 if any token
differs. (The suite does the same on a tiny model, tests/e2e/test_preemption_tokens.py.) With tensor parallel ranks, of
which there may be more than cores here, what is compared with is one rank with memory for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams
from chairlift.execution import tensor_parallel

REQUESTS = Path(__file__).parent / "data" / "requests.json"
MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 16
MODES = ("recompute", "swap", "auto")
ENOUGH, SHORT = 256, 40  # blocks of 16 tokens
BLOCK_BYTES = 16 * 2 * 30 * 3 * 64 * 4  # tokens × (key, value) × layers × heads × width × fp32, of SmolLM2-135M


def workload(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Cuts of the request set's prompts, of 5 to 64 tokens, some of which begin alike; 16 to 79 new tokens."""
    requests = json.loads(REQUESTS.read_text())["reqs"]
    prompts = [requests[i % 50]["prompt"][: 5 + 7 * i % 60] for i in range(count)]
    params = [
        SamplingParams(
            max_tokens=16 + 13 * i % 64, temperature=0.0 if i % 2 else 0.8, top_p=0.95, seed=i, ignore_eos=True
        )
        for i in range(count)
    ]
    return prompts, params


def run(count: int, num_blocks: int, **options: Any) -> tuple[list[list[int]], int, int]:
    """Every answer's tokens, how often a request was put aside, and how many different ones were."""
    prompts, params = workload(count)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="requests")
    parser.add_argument("--blocks", type=int, default=SHORT, help="of the small KV cache")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    count, ranks = arguments.count, arguments.tensor_parallel_size
    expected, aside, _ = run(count, ENOUGH, enable_prefix_caching=False)
    print(f"memory for all: {sum(map(len, expected)):,} tokens, {aside} put aside", flush=True)
    if ranks > 1:
        tensor_parallel.available_cores = lambda: ranks
    wrong = 0
    for caching in (False, True):
        for mode in arguments.modes:
            started = time.perf_counter()
            tokens, aside, requests = run(
                count,
                arguments.blocks,
                preemption_mode=mode,
                swap_space=0.0 if mode == "recompute" else 1.0,
                enable_prefix_caching=caching,
                tensor_parallel_size=ranks,
            )
            different = sum(a != b for a, b in zip(tokens, expected, strict=True))
            wrong += different
            print(
                f"{mode:10} prefix cache {'on ' if caching else 'off'}: {requests} of {count} requests put aside, "
                f"{aside} times; {different} answers differ ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
