"""Offline throughput against plain ``transformers``, and as a share of what the machine's matrix products reach.

    python benchmarks/offline.py                    # 64 requests, 3 repeats: minutes, most of them in transformers
    python benchmarks/offline.py --limit 16         # the first 16 requests

Both engines get the same requests (benchmarks/data/requests.json), greedy, with outputs of forced length. Each lives in
a process of its own and they run in turn, A B A B, so that the machine's noise hits both. transformers runs what its
documentation shows for a batch: ``generate`` on left-padded batches, each to its longest output. Needs the dev extra.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.config import available_cores
from chairlift.measure.flops import useful_work
from chairlift.model.config import ModelConfig, read_config
from chairlift.model.llama import CausalLM
from chairlift.model.registry import load_model
from chairlift.model.source import resolve

REQUESTS = Path(__file__).parent / "data" / "requests.json"
PEAK_SIZE = 2048

Request = dict[str, Any]


def matrix_peak(dtype: torch.dtype, seconds: float = 2.0) -> float:
    """FLOPs a second of the best of many products of large square matrices."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * PEAK_SIZE**3 / best


def to_transformers(model: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The same weights in transformers' own class, through a directory that it loads itself."""
    source = resolve(model)
    if source.format == "safetensors":
        return transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype).eval()
    config = read_config(source)
    ours = load_model(source, config, dtype=torch.float32, device=torch.device("cpu"))
    published = transformers.LlamaForCausalLM(_llama_config(config))
    published.load_state_dict(_state(ours), strict=False)
    published.tie_weights()
    with tempfile.TemporaryDirectory() as directory:
        published.to(dtype).save_pretrained(directory)
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def _state(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: slot.tensor.clone() for name, slot in model.slots().items()}


def _llama_config(config: ModelConfig) -> transformers.LlamaConfig:
    if config.architecture != "LlamaForCausalLM" or config.rope_scaling:
        raise SystemExit(f"--model: {config.architecture} in a .gguf file cannot be handed to transformers here")
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )


class Transformers:
    """Left-padded batches in the order of the requests, each generated to its longest output."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(available_cores())
        transformers.utils.logging.disable_progress_bar()
        self.model = to_transformers(arguments.model, getattr(torch, arguments.dtype))
        self.batch_size = arguments.static_batch_size

    def run(self, requests: Sequence[Request]) -> None:
        for first in range(0, len(requests), self.batch_size):
            self._batch(requests[first : first + self.batch_size])

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Request]) -> None:
        width = max(len(request["prompt"]) for request in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        length = max(request["out"] for request in batch)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        assert output.shape[1] == width + length


class Chairlift:
    """All requests at once, continuously batched."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.llm = LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=1024,
            max_num_seqs=arguments.max_num_seqs,
            enable_prefix_caching=False,  # or the second run would find the prompts of the first
        )

    def run(self, requests: Sequence[Request]) -> None:
        params = [SamplingParams(max_tokens=r["out"], temperature=0, ignore_eos=True) for r in requests]
        outputs = self.llm.generate([request["prompt"] for request in requests], params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [request["out"] for request in requests]


ENGINES = {"chairlift": Chairlift, "transformers": Transformers}
engine: Chairlift | Transformers


def start(name: str, arguments: argparse.Namespace) -> None:
    """Makes the one engine of this process."""
    global engine
    engine = ENGINES[name](arguments)


def timed_run(requests: Sequence[Request]) -> float:
    started = time.perf_counter()
    engine.run(requests)
    return time.perf_counter() - started


def spread(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--limit", type=int, default=None, help="use the first N requests only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--static-batch-size", type=int, default=16, help="of transformers")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    requests = json.loads(REQUESTS.read_text())["reqs"][: arguments.limit]
    warm_up = [dict(request, out=4) for request in requests[:4]]
    dtype = getattr(torch, arguments.dtype)
    torch.set_num_threads(available_cores())
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    peaks: list[float] = []
    context = multiprocessing.get_context("spawn")
    pools = {name: context.Pool(1, initializer=start, initargs=(name, arguments)) for name in ENGINES}
    for pool in pools.values():
        pool.apply(timed_run, (warm_up,))
    for _ in range(arguments.repeats):
        peaks.append(matrix_peak(dtype))
        for name, pool in pools.items():
            seconds[name].append(pool.apply(timed_run, (requests,)))
    for pool in pools.values():
        pool.terminate()
    report(arguments, requests, seconds, peaks)


def report(
    arguments: argparse.Namespace, requests: list[Request], seconds: dict[str, list[float]], peaks: list[float]
) -> None:
    prompt_tokens = sum(len(request["prompt"]) for request in requests)
    output_tokens = sum(request["out"] for request in requests)
    work = useful_work(read_config(resolve(arguments.model)), max(peaks))
    rows = prompt_tokens + output_tokens - len(requests)  # the last token of each is generated, not computed
    flops = work.flops_per_row * rows + work.flops_per_token * output_tokens
    print(f"model {arguments.model}, {arguments.dtype}, {available_cores()} cores, {arguments.repeats} repeats in turn")
    print(f"{len(requests)} requests at once: {prompt_tokens:,} prompt tokens, {output_tokens:,} output tokens, greedy")
    print(f"matrix peak, {PEAK_SIZE} × {PEAK_SIZE} products: {spread([p / 1e9 for p in peaks], 0)} GFLOP/s\n")
    print(f"{'':14}{'seconds':>24}{'total tokens/s':>28}{'share of peak':>20}")
    for name, times in seconds.items():
        rates = [(prompt_tokens + output_tokens) / t for t in times]
        share = [100 * flops / t / work.peak for t in times]
        print(f"{name:14}{spread(times, 2):>24}{spread(rates, 0):>28}{spread(share) + ' %':>20}")
    ratios = [b / a for a, b in zip(seconds["chairlift"], seconds["transformers"], strict=True)]
    print(f"\nchairlift is {spread(ratios, 2)} times as fast as transformers' static batches, pair by pair")


if __name__ == "__main__":
    main()
