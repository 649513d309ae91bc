"""What lower precision costs: perplexity, and how often the most likely token is still the same.

    python benchmarks/accuracy.py                  # a minute or two
    python benchmarks/accuracy.py --as-decoded     # by the kernels of decoding rather than those of prompts

float32 answers the request set (benchmarks/data/requests.json) greedily. Each precision then reads the same prompts and
answers. Agreement is the share of answer tokens that are its most likely ones too, given all that float32 wrote before
(teacher-forced). Perplexity is over the prompts, which are cuts of Python's documentation.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from chairlift import LLM, SamplingParams

REQUESTS = Path(__file__).parent / "data" / "requests.json"
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-kv8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-kv8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
READ = SamplingParams(max_tokens=0, prompt_logprobs=0)


def scores(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> tuple[float, float, float]:
    """Perplexity of the prompts, agreement over the answers, and the mean logprob of the answers."""
    outputs = llm.generate([p + a for p, a in zip(prompts, answers, strict=True)], READ)
    read, same, likely = [], [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        known = len(prompt) - 1  # the first token has nothing before it
        read += [token.logprob for token in output.prompt_logprobs[:known]]
        same += [token.rank == 1 for token in output.prompt_logprobs[known:]]
        likely += [token.logprob for token in output.prompt_logprobs[known:]]
    return math.exp(-sum(read) / len(read)), sum(same) / len(same), sum(likely) / len(likely)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--limit", type=int, help="use the first N requests only")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--as-decoded", action="store_true", help="read a token of each request in a step, as decoding does"
    )
    arguments = parser.parse_args()
    requests = json.loads(REQUESTS.read_text())["reqs"][: arguments.limit]
    prompts = [request["prompt"] for request in requests]
    lengths = [SamplingParams(temperature=0, max_tokens=request["out"], ignore_eos=True) for request in requests]
    options = {"max_model_len": max(len(r["prompt"]) + r["out"] for r in requests) + 1}
    llm = LLM(arguments.model, dtype="float32", **options)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, lengths)]
    del llm
    if arguments.as_decoded:
        together = len(requests)
        options |= {"max_num_seqs": together, "max_num_batched_tokens": together}
        options |= {"max_num_partial_prefills": together, "long_prefill_token_threshold": 1}
    counts = f"{len(requests)} requests, {sum(map(len, prompts))} prompt and {sum(map(len, answers))} answer tokens"
    print(f"{arguments.model}, {counts}")
    print(f"{'precision':<14}{'perplexity':>12}{'agreement':>11}{'mean logprob of answers':>26}")
    for name in arguments.precisions:
        perplexity, agreement, likely = scores(LLM(arguments.model, **PRECISIONS[name], **options), prompts, answers)
        print(f"{name:<14}{perplexity:>12.3f}{agreement:>11.2%}{likely:>26.4f}")


if __name__ == "__main__":
    main()
