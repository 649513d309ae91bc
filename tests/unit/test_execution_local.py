"""The local executor on a tiny model: the same tokens however they are batched, and settings that cannot work."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executing import generate, with_seeds
from support.tiny_model import TINY_MODEL_LEN, save_tiny_model
from transformers import LlamaForCausalLM

from chairlift.config import ConfigError, EngineConfig
from chairlift.engine.executor import Executor
from chairlift.execution import local, start
from chairlift.execution.kv_store import KVStore
from chairlift.execution.local import LocalExecutor
from chairlift.execution.setup import resolve_device, resolve_dtype
from chairlift.model.attention.base import KVLayout
from chairlift.model.config import read_config
from chairlift.model.source import resolve
from chairlift.scheduling.plan import RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

CPU = torch.device("cpu")
MIB = 1024**2
GREEDY = SamplingParams(temperature=0, seed=0)
PROMPTS = [[(7 * i * i + 3 * i + n) % 256 for i in range(n)] for n in (1, 5, 16, 33, 70)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


def executor(model: Path, **settings: Any) -> LocalExecutor:
    # One thread: so small a model gains nothing from two, which wait for each other where other processes run.
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "max_model_len": 128,
        "num_threads": 1,
    }
    return LocalExecutor(EngineConfig(model=str(model), **{**defaults, **settings}))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Greedy tokens of ``transformers``."""
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_same_tokens_however_batched(model: Path, expected: list[list[int]], block_size: int, backend: str) -> None:
    tested: Executor = executor(model, block_size=block_size, attention_backend=backend)
    for chunk in (1, 7, 1000):
        assert generate(tested, PROMPTS, NUM_TOKENS, chunk=chunk) == expected
    alone = [generate(tested, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    assert alone == expected
    tested.close()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_int8_cache(model: Path, backend: str) -> None:
    tested = executor(model, kv_cache_dtype="int8", attention_backend=backend)
    assert tested.capacity().kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)  # a byte a number, and a scale a head
    whole = generate(tested, PROMPTS, NUM_TOKENS)
    assert [len(tokens) for tokens in whole] == [NUM_TOKENS] * len(PROMPTS)
    assert generate(tested, PROMPTS, NUM_TOKENS, chunk=1) == whole, "what is read is what was written, in any chunks"


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.int8, 4)])
def test_blocks_are_copied_with_all_that_belongs_to_them(model: Path, dtype: torch.dtype, parts: int) -> None:
    config = read_config(resolve(str(model), None))
    here, there = (KVStore(config, KVLayout(), num_blocks=n, block_size=4, dtype=dtype, device=CPU) for n in (3, 2))
    for layer in there.layers:
        assert len(layer.tensors) == parts
        for tensor in layer.tensors:
            tensor.copy_(torch.randint(-99, 99, tensor.shape))
    here.copy_from(there, [(0, 2), (1, 0)])
    for layer, source in zip(here.layers, there.layers, strict=True):
        for tensor, original in zip(layer.tensors, source.tensors, strict=True):
            assert torch.equal(tensor[2], original[0])
            assert torch.equal(tensor[0], original[1])
            assert not tensor[1].any()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8), SamplingParams(top_p=0.9, top_k=40)])
def test_seeded_draws_however_batched(model: Path, params: SamplingParams) -> None:
    tested = executor(model)
    seeded = with_seeds(params, len(PROMPTS))
    together = generate(tested, PROMPTS, NUM_TOKENS, chunk=9, params=seeded)
    alone = [generate(tested, [p], NUM_TOKENS, params=[s])[0] for p, s in zip(PROMPTS, seeded, strict=True)]
    assert together == alone
    assert together != generate(tested, PROMPTS, NUM_TOKENS)


def test_threads(model: Path, expected: list[list[int]]) -> None:
    before = torch.get_num_threads()
    try:
        tested = executor(model, num_threads=2)
        assert torch.get_num_threads() == 2
        assert generate(tested, PROMPTS[:3], 3) == [tokens[:3] for tokens in expected[:3]]
    finally:
        torch.set_num_threads(before)


def test_padding_changes_nothing(model: Path, expected: list[list[int]]) -> None:
    tested = executor(model, block_size=16)
    prompt, table = PROMPTS[1], [3, 1]
    padded = SequenceChunk("a", [*prompt, 0, 0, 0, 0, 0], 0, table, GREEDY, 5)
    tokens = list(tested.execute(StepPlan(0, [padded], RowCounts())).token_ids)
    for i in range(NUM_TOKENS - 1):
        chunk = SequenceChunk("a", tokens[-1:], len(prompt) + i, table, GREEDY)
        tokens += tested.execute(StepPlan(i + 1, [chunk], RowCounts())).token_ids
    assert tokens == expected[1]


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "cpu"), ("float16", "reference")])
def test_half_precision_runs_on_the_cpu(model: Path, dtype: str, backend: str) -> None:
    tested = executor(model, dtype=dtype)
    capacity = tested.capacity()
    assert (capacity.dtype, capacity.attention_backend) == (dtype, backend)
    assert len(generate(tested, PROMPTS, 3, chunk=20)[4]) == 3


def test_capacity(model: Path) -> None:
    tested = executor(model, max_num_seqs=3, max_model_len=100, block_size=32, enforce_eager=True)
    capacity = tested.capacity()
    # What three sequences of four blocks can use, though memory would hold more.
    assert capacity.num_blocks == 12
    assert capacity.block_size == 32
    assert capacity.num_token_slots == 384
    assert capacity.max_model_len == 100
    assert capacity.vocab_size == 258
    assert capacity.eos_token_ids == (257,)
    assert capacity.model == str(model)
    assert capacity.architecture == "LlamaForCausalLM"
    assert (capacity.device, capacity.dtype, capacity.attention_backend) == ("cpu", "float32", "cpu")
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    # The head is packed in whole blocks of 32 columns.
    assert capacity.weight_bytes == 4 * (2 * layer + (258 + 288) * 64 + 64)
    assert capacity.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert capacity.max_num_batched_tokens == 512
    assert capacity.num_host_blocks == 0


def test_token_budget(model: Path) -> None:
    assert executor(model, max_num_batched_tokens=99).capacity().max_num_batched_tokens == 99
    # A full batch can always decode.
    assert executor(model, max_num_seqs=3000).capacity().max_num_batched_tokens == 3000


def test_longest_length_is_the_models_own(model: Path) -> None:
    assert executor(model, max_model_len=None).capacity().max_model_len == TINY_MODEL_LEN
    with pytest.raises(ConfigError, match=f"{TINY_MODEL_LEN + 1} is longer than the {TINY_MODEL_LEN} positions"):
        executor(model, max_model_len=TINY_MODEL_LEN + 1)


def test_kv_bytes_are_kept_to(model: Path) -> None:
    per_block = 512 * 16
    tested = executor(model, kv_cache_memory_bytes=per_block * 20 + 100, max_model_len=300)
    assert tested.capacity().num_blocks == 20
    with pytest.raises(
        ConfigError, match=r"of --max-model-len 321: .*to 320 or less, or raise --kv-cache-memory-bytes"
    ):
        executor(model, kv_cache_memory_bytes=per_block * 20 + 100, max_model_len=321)


def test_a_share_is_of_what_was_there_before_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_host_memory", lambda: 40 * MIB)
    blocks = executor(model, gpu_memory_utilization=0.5, max_num_seqs=100).capacity().num_blocks
    # Half of it less half a MiB of weights and the reserve of a step: 8 KiB a block.
    assert 0.3 * 20 * MIB < blocks * 512 * 16 < 20 * MIB - 500_000
    assert executor(model, max_num_seqs=100).capacity().num_blocks == blocks
    with pytest.raises(
        ConfigError, match=r"2% of 40\.0 MiB on the CPU, less 0\.4 MiB for the weights.*raise --gpu-mem"
    ):
        executor(model, gpu_memory_utilization=0.02)


def test_nonsense_names_its_request_and_costs_the_others_nothing(model: Path) -> None:
    tested = executor(model)
    assert tested._runner is not None
    tested._runner.model.embedding.data[77] = math.nan
    good = SequenceChunk("good", [1, 2], 0, [0], GREEDY)
    other = SequenceChunk("other", [5, 6], 0, [2], SamplingParams(seed=1))
    alone = [tested.execute(StepPlan(0, [chunk], RowCounts())) for chunk in (good, other)]
    bad = SequenceChunk("bad", [3, 77], 0, [1], SamplingParams(seed=2))
    result = tested.execute(StepPlan(4, [good, bad, other], RowCounts()))
    assert [result.token_ids[0], result.token_ids[2]] == [r.token_ids[0] for r in alone]
    assert list(result.failed) == ["bad"]
    assert "of request bad in step 4 are not finite" in result.failed["bad"]
    assert not alone[0].failed


def test_a_step_without_chunks(model: Path) -> None:
    assert list(executor(model).execute(StepPlan(0, [], RowCounts())).token_ids) == []


def test_close(model: Path) -> None:
    tested = executor(model)
    tested.close()
    tested.close()
    assert tested.capacity().num_blocks > 0
    with pytest.raises(RuntimeError, match="closed"):
        tested.execute(StepPlan(0, [], RowCounts()))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", torch.bfloat16),
        ("flags\t\t: fpu avx512f amx_bf16", torch.bfloat16),
        ("Features\t: fp asimd i8mm bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f avx512bw", torch.float32),
        ("", torch.float32),
    ],
)
def test_auto_dtype_is_what_the_cpu_computes_in(tmp_path: Path, flags: str, dtype: torch.dtype) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{flags}\n")
    assert resolve_dtype("auto", CPU, info) == dtype
    assert resolve_dtype("float16", CPU, info) == torch.float16


def test_auto_dtype_of_an_unknown_cpu(tmp_path: Path) -> None:
    assert resolve_dtype("auto", CPU, tmp_path / "none") == torch.float32


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        resolve_device("cuda")


def test_what_takes_long_at_the_start_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger=start.__name__)
    with start._progress("what is soon done"):
        pass
    assert not caplog.messages
    monkeypatch.setattr(start, "PROGRESS_SECONDS", 0.001)
    with start._progress("compiling"):
        while not caplog.messages:
            time.sleep(0.001)
    assert caplog.messages[0] == "compiling: 0 s so far"
    assert caplog.messages[-1] == "compiling: done in 0 s"
