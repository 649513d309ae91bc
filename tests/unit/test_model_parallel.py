"""A model cut into parts: which part is whose, what each reads, and that together they compute the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.model_driver import generate
from torch import Tensor

from chairlift.config import ConfigError
from chairlift.model.attention.base import BatchLayout, KVLayout, LayerKVs, kv_width
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.config import ModelConfig
from chairlift.model.fused import unsupported
from chairlift.model.llama import CausalLM
from chairlift.model.loader.safetensors import SafetensorsTensor
from chairlift.model.parallel import Partition, Span, check_size
from chairlift.model.registry import load_model
from chairlift.model.source import ModelSource

CPU = torch.device("cpu")
PROMPT = [5, 17, 42, 8, 63, 96, 0, 33]
BLOCK = 4


def config(**changes: Any) -> ModelConfig:
    """Nine heads in three groups, and nothing else that divides evenly either."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 50,
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**{**sizes, **changes})


class Meeting:
    """Where threads that play ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait()
        taken = list(self.brought)
        self.barrier.wait()
        return taken


class ThreadRank:
    """A communicator of one of them."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        taken = self._meeting.exchange(self.rank, x)
        assert len({piece.shape for piece in taken}) == 1
        return torch.stack(taken).sum(0)

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        taken = self._meeting.exchange(self.rank, x)
        assert len({piece.shape for piece in taken}) == 1
        return taken if self.rank == 0 else []


def in_parallel(size: int, play: Callable[[ThreadRank], Tensor]) -> list[Tensor]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: play(ThreadRank(rank, meeting)), range(size)))


def logits_of_prompt(model: CausalLM) -> Tensor:
    """[tokens, vocabulary] of one prompt in one step."""
    own, count = model.config, -(-len(PROMPT) // BLOCK)
    shape = (own.num_layers, count, own.num_kv_heads)
    sizes: dict[str, Any] = {"num_heads": own.num_heads, "num_kv_heads": own.num_kv_heads, "head_dim": own.head_dim}
    attention = ReferenceAttention(block_size=BLOCK, dtype=torch.float32, **sizes)
    n = len(PROMPT)
    layout = BatchLayout(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.arange(count, dtype=torch.int32)[None],
        slot_mapping=torch.arange(n),
        max_query_len=n,
        max_seq_len=n,
    )
    kv = LayerKVs(KVLayout(), torch.zeros(*shape, kv_width(BLOCK, own.head_dim, torch.float32)), BLOCK)
    rows = torch.arange(n)
    output = model(torch.tensor(PROMPT), rows, kv, attention, attention.prepare(layout), rows)
    return output.logits


def save(path: Path, whole: ModelConfig) -> ModelSource:
    torch.manual_seed(0)
    slots = CausalLM(whole, dtype=torch.float32, device=CPU).slots()
    tensors = {name: torch.randn(slot.shape) * 0.4 for name, slot in slots.items()}
    if whole.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    return ModelSource("m", "safetensors", path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": True, "num_heads": 12, "num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"num_kv_heads": 9},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_parts_compute_what_the_whole_does(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = config(**changes)
    source = save(tmp_path, whole)
    expected = logits_of_prompt(load_model(source, whole, dtype=torch.float32, device=CPU))
    for size in (2, 3, 4, 5, 9):
        first, *others = in_parallel(
            size,
            lambda ranks: logits_of_prompt(load_model(source, whole, dtype=torch.float32, device=CPU, ranks=ranks)),
        )
        torch.testing.assert_close(first, expected, atol=2e-5, rtol=1e-4)
        assert all(other.shape[1] < whole.vocab_size for other in others)


def test_the_expected_is_what_the_driver_of_other_tests_computes(tmp_path: Path) -> None:
    whole = config()
    model = load_model(save(tmp_path, whole), whole, dtype=torch.float32, device=CPU)
    (driven,) = generate(model, [PROMPT], 1)
    torch.testing.assert_close(driven.logits[0], logits_of_prompt(model)[-1])


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part_and_no_more(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config(vocab_size=400, intermediate_size=300)
    source = save(tmp_path, whole)
    read = SafetensorsTensor.read
    numbers: list[int] = []

    def counted(self: SafetensorsTensor, index: tuple[slice, ...]) -> Tensor:
        values = read(self, index)
        numbers.append(values.numel())
        return values

    monkeypatch.setattr(SafetensorsTensor, "read", counted)
    all_of_it = load_model(source, whole, dtype=torch.float32, device=CPU).weight_bytes
    assert sum(numbers) * 4 == all_of_it
    for rank in range(size):
        numbers.clear()
        part = load_model(source, whole, dtype=torch.float32, device=CPU, ranks=ThreadRank(rank, Meeting(size)))
        assert sum(numbers) * 4 == part.weight_bytes == sum(p.numel() * 4 for p in part.parameters())
        assert part.weight_bytes < 1.15 * all_of_it / size


def test_every_head_has_one_rank_and_its_key_value_head_there() -> None:
    for num_kv_heads in range(1, 7):
        for group in range(1, 6):
            num_heads = num_kv_heads * group
            whole = config(num_heads=num_heads, num_kv_heads=num_kv_heads)
            for size in range(1, num_heads + 1):
                parts = [Partition.of(whole, rank, size) for rank in range(size)]
                assert [head for part in parts for head in span(part.heads)] == list(range(num_heads))
                for part in parts:
                    own = part.config
                    assert (own.num_heads, own.num_kv_heads) == (len(part.heads), len(part.kv_heads))
                    for i, head in enumerate(span(part.heads)):
                        local = i // (own.num_heads // own.num_kv_heads)  # as attention takes it
                        assert span(part.kv_heads)[local] == head // group
                # No cut along whole groups, or within them, has a smaller largest part.
                most = max(len(part.heads) for part in parts)
                if size <= num_kv_heads:
                    assert most == group * ceil(num_kv_heads / size)
                    assert sum(len(part.kv_heads) for part in parts) == num_kv_heads
                else:
                    assert most == ceil(group / (size // num_kv_heads))
                    assert all(len(part.kv_heads) == 1 for part in parts)


def span(of: Span) -> list[int]:
    return list(range(of.start, of.stop))


def test_smollm2s_heads() -> None:
    whole = config(num_heads=9, num_kv_heads=3)
    heads = {size: [len(Partition.of(whole, r, size).heads) for r in range(size)] for size in (1, 2, 3, 4, 9)}
    assert heads == {1: [9], 2: [3, 6], 3: [3, 3, 3], 4: [1, 2, 3, 3], 9: [1] * 9}


def test_columns_and_vocabulary_are_cut_evenly() -> None:
    whole = config()
    for size in range(1, 10):
        parts = [Partition.of(whole, rank, size) for rank in range(size)]
        for cut, total in (([p.inner for p in parts], 50), ([p.vocab for p in parts], 97)):
            assert [i for piece in cut for i in span(piece)] == list(range(total))
            assert max(map(len, cut)) - min(map(len, cut)) <= 1
        assert all(part.config.vocab_size == 97 for part in parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--tensor-parallel-size 10 is more than the model's 9 query heads, .* use 9 or less"),
        ({"num_heads": 12, "intermediate_size": 7}, "10 is more than the model's 7 MLP columns, .* use 7 or less"),
        ({"num_heads": 12, "vocab_size": 8}, "10 is more than the model's 8 tokens of vocabulary, .* use 8 or less"),
    ],
)
def test_more_ranks_than_there_is_to_share(changes: dict[str, Any], message: str) -> None:
    whole = config(**changes)
    check_size(whole, 1)
    with pytest.raises(ConfigError, match=message):
        check_size(whole, 10)


def test_fused_steps_are_for_one_rank() -> None:
    assert "ranks have to meet" in (unsupported(config(), torch.float32, None, 2) or "")
