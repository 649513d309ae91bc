"""The same answers on a CUDA device as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executing import generate, with_seeds
from support.paged_batch import Heads, paged_batch
from support.tiny_model import save_tiny_model

from chairlift.config import EngineConfig
from chairlift.execution.local import LocalExecutor
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.attention.select import select_backend
from chairlift.scheduling.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

MIXED = [(1, 1), (1, 17), (5, 5), (40, 200), (1, 64), (3, 129), (1, 300)]
PROMPTS = [[(7 * i * i + 3 * i + n) % 256 for i in range(n)] for n in (1, 5, 16, 33, 70)]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(dtype: torch.dtype, block_size: int, window: int | None) -> None:
    heads = Heads(num_heads=6, num_kv_heads=2, block_size=block_size, dtype=dtype)
    batch = paged_batch(heads, MIXED)
    expected, expected_kv = batch.run(heads.backend(ReferenceAttention), window)
    backend = select_backend(
        "auto",
        torch.device("cuda"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    output, kv = batch.to(torch.device("cuda")).run(backend, window)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(output.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.key.cpu(), expected_kv.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(kv.value.cpu(), expected_kv.value, atol=0, rtol=0, equal_nan=True)


def executor(model: Path, device: str, dtype: str = "float32") -> LocalExecutor:
    return LocalExecutor(EngineConfig(model=str(model), device=device, dtype=dtype, max_num_seqs=8, max_model_len=128))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.9)])
def test_tokens(model: Path, params: SamplingParams) -> None:
    seeded = with_seeds(params, len(PROMPTS))
    cpu, cuda = executor(model, "cpu"), executor(model, "cuda")
    assert cuda.capacity().device.startswith("cuda")
    assert cuda.capacity().num_blocks == cpu.capacity().num_blocks
    answers = [generate(e, PROMPTS, 12, chunk=9, params=seeded) for e in (cpu, cuda)]
    assert answers[0] == answers[1]
    cuda.close()


def test_bfloat16_is_the_default(model: Path) -> None:
    cuda = executor(model, "auto", "auto")
    assert (cuda.capacity().dtype, cuda.capacity().device) == ("bfloat16", "cuda:0")
    assert len(generate(cuda, PROMPTS, 3)[0]) == 3
