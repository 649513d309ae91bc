"""How much of what the machine can do a decode step reaches, and where the rest goes.

    python benchmarks/roofline.py                          # bf16: a few minutes
    python benchmarks/roofline.py --quantization int8
    python benchmarks/roofline.py --sequences 1 32 --contexts 128 --repeats 9

A step is everything between a plan and its sampled tokens. Its ceiling is the time that its products take at the
machine's matrix peak, or that its weights, keys and values take to be read at the machine's bandwidth, whichever is
longer; both are measured in the same run. The stages are those of the kernel that runs a step, as its first thread saw
them; "head" is the product with the output embeddings, and "rest" what is left: sampling, laying the batch out, Python.

Each sequence's blocks lie in random order, as they do after a while of serving, and hold numbers: reading memory that
nobody has written takes no time, since all of it is one page of zeros.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import numba
import torch
from machine import matrix_peak, read_bandwidth

from chairlift.config import EngineConfig, available_cores
from chairlift.execution.local import LocalExecutor
from chairlift.model.fused import FusedCausalLM
from chairlift.model.kernels.decoder import STAGES
from chairlift.model.kernels.threads import ticks
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, seed=0)


@numba.njit
def _ticks() -> int:
    return ticks()


def ticks_per_second() -> float:
    """The rate of the clock that the kernel reads."""
    _ticks()
    first, started = _ticks(), time.perf_counter()
    time.sleep(0.2)
    return (_ticks() - first) / (time.perf_counter() - started)


def blocks_of(context: int) -> int:
    """KV blocks of a sequence, with its next token."""
    return context // BLOCK_SIZE + 1


def decode_step(sequences: int, context: int, num_blocks: int) -> StepPlan:
    """A step in which so many sequences of that context, spread over ``num_blocks``, get one token each."""
    blocks = blocks_of(context)
    order = random.Random(0).sample(range(num_blocks), sequences * blocks)
    chunks = [
        SequenceChunk(str(i), [i + 1], context, order[i * blocks : (i + 1) * blocks], GREEDY) for i in range(sequences)
    ]
    return StepPlan(0, chunks, RowCounts(decode=sequences))


def work(model: FusedCausalLM, sequences: int, context: int, kv_bytes: int) -> tuple[float, float]:
    """Operations of a step's products and attention, and bytes that it has to read."""
    config = model.config
    width = config.num_heads * config.head_dim
    layer = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
    products = config.num_layers * layer + config.hidden_size * config.vocab_size
    attention = 2 * config.num_layers * width * context
    # Of the embedding table a step reads a row for each sequence.
    weights = model.weight_bytes - model.embedding.nbytes
    return 2.0 * sequences * (products + attention), weights + sequences * context * kv_bytes


def measure(
    executor: LocalExecutor, model: FusedCausalLM, plan: StepPlan, repeats: int, rate: float
) -> tuple[float, dict[str, float]]:
    """Median seconds of a step, and of each stage."""
    steps, stages = [], []
    for _ in range(repeats + 2):
        model.times[:] = 0
        started = time.perf_counter()
        executor.execute(plan)
        steps.append(time.perf_counter() - started)
        stages.append(model.times[0] / rate)
    named = {name: statistics.median(s[i] for s in stages[2:]) for i, name in enumerate(STAGES)}
    step = statistics.median(steps[2:])
    named["rest"] = step - sum(named.values())
    return step, named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    threads, most = available_cores(), max(arguments.contexts) + 1
    blocks = max(arguments.sequences) * blocks_of(most)
    options: dict[str, Any] = {"max_num_seqs": max(arguments.sequences), "max_model_len": most}
    executor = LocalExecutor(
        EngineConfig(
            model=arguments.model, dtype=arguments.dtype, quantization=arguments.quantization,
            gpu_memory_utilization=0.9, block_size=BLOCK_SIZE, **options,
        )
    )  # fmt: skip
    capacity = executor.capacity()
    executor.kv.layers.numbers[:, :blocks].fill_(1)
    model = executor.model
    if not isinstance(model, FusedCausalLM):
        parser.error("this model does not run in fused steps here")
    torch.set_num_threads(threads)
    precision = torch.int8 if arguments.quantization else getattr(torch, arguments.dtype)
    peak, bandwidth, rate = matrix_peak(precision, 0.3), read_bandwidth(threads, 1.0), ticks_per_second()
    kind = arguments.quantization or arguments.dtype
    print(f"{arguments.model}, {kind}, {threads} threads, median of {arguments.repeats} steps")
    print(f"matrix peak {peak / 1e9:,.0f} GFLOP/s, reads {bandwidth / 1e9:.1f} GB/s; {blocks} KV blocks wanted\n")
    print(f"{'seqs':>5}{'context':>8}{'ms':>9}{'ceiling':>9}{'share':>7}   of the step, by stage, in %")
    for context in arguments.contexts:
        for sequences in arguments.sequences:
            if sequences * blocks_of(context) > capacity.num_blocks:
                print(f"{sequences:>5}{context:>8}   does not fit into the {capacity.num_blocks} KV blocks there are")
                continue
            plan = decode_step(sequences, context, min(blocks, capacity.num_blocks))
            step, stages = measure(executor, model, plan, arguments.repeats, rate)
            operations, read = work(model, sequences, context, capacity.kv_bytes_per_token)
            ceiling = max(operations / peak, read / bandwidth)
            bound = "reads" if read / bandwidth > operations / peak else "products"
            shares = "  ".join(
                f"{name} {seconds / step:.0%}" for name, seconds in stages.items() if seconds / step > 0.005
            )
            figures = f"{sequences:>5}{context:>8}{step * 1e3:>9.1f}{ceiling * 1e3:>9.1f}{ceiling / step:>7.0%}"
            print(f"{figures}   {bound}: {shares}")


if __name__ == "__main__":
    main()
