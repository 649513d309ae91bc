"""Tensor parallel against one rank: the same greedy tokens in fp32, bytes on each rank, and what a step costs.

    python benchmarks/tensor_parallel.py --model smollm2 --ranks 2 4

More ranks than cores are refused elsewhere and allowed here: they show that the tokens are right, not how fast it is.
"""

from __future__ import annotations

import argparse
import statistics

from chairlift.config import EngineConfig
from chairlift.engine.executor import Executor
from chairlift.execution import tensor_parallel
from chairlift.execution.local import LocalExecutor
from chairlift.execution.tensor_parallel import TensorParallelExecutor
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, seed=0)
LENGTHS = (5, 40, 17, 90)


def generate(executor: Executor, num_tokens: int) -> tuple[list[list[int]], float]:
    """Runs prompts of a few lengths together; returns what each generated, and the median seconds of a step."""
    capacity = executor.capacity()
    blocks = -(-(max(LENGTHS) + num_tokens) // capacity.block_size)
    sequences = [[(31 * i * i + 7 * i + n) % capacity.vocab_size for i in range(n)] for n in LENGTHS]
    done, seconds = [0] * len(sequences), []
    for step in range(num_tokens):
        chunks = [
            SequenceChunk(str(i), tokens[done[i] :], done[i], range(i * blocks, (i + 1) * blocks), GREEDY)
            for i, tokens in enumerate(sequences)
        ]
        result = executor.execute(StepPlan(step, chunks, RowCounts()))
        seconds.append(result.elapsed)
        for i, token in enumerate(result.token_ids):
            done[i] = len(sequences[i])
            sequences[i].append(token)
    return [tokens[n:] for tokens, n in zip(sequences, LENGTHS, strict=True)], statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    settings = {"model": arguments.model, "dtype": "float32", "max_num_seqs": len(LENGTHS), "max_model_len": 256}

    one = LocalExecutor(EngineConfig(**settings))
    expected, seconds = generate(one, arguments.tokens)
    print(f"1 rank: {one.capacity().weight_bytes / 1e6:.1f} MB, {seconds * 1e3:.1f} ms a step", flush=True)
    one.close()
    for size in arguments.ranks:
        tensor_parallel.available_cores = lambda size=size: size
        executor = TensorParallelExecutor(EngineConfig(**settings, tensor_parallel_size=size))
        tokens, seconds = generate(executor, arguments.tokens)
        held = ", ".join(f"{holding.weights / 1e6:.1f}" for holding in executor.holdings)
        same = "the same tokens" if tokens == expected else "OTHER TOKENS"
        print(f"{size} ranks: {held} MB, {seconds * 1e3:.1f} ms a step, {same}", flush=True)
        executor.close()


if __name__ == "__main__":
    main()
