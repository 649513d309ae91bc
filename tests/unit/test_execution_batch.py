"""What a plan looks like as tensors."""

from __future__ import annotations

import torch

from chairlift.execution.batch import build_batch
from chairlift.execution.kv_store import KVStore, kv_bytes_per_token
from chairlift.model.attention.base import KVLayout
from chairlift.model.config import ModelConfig
from chairlift.scheduling.plan import PromptTargets, RowCounts, SequenceChunk, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, seed=0)
WARM = SamplingParams(temperature=1, seed=3)


def plan(*chunks: SequenceChunk) -> StepPlan:
    return StepPlan(7, chunks, RowCounts())


def test_rows_of_a_mixed_step() -> None:
    batch = build_batch(
        plan(
            SequenceChunk("decode", [50], 6, [9, 4, 2], GREEDY),
            SequenceChunk("chunk", [11, 12, 13], 0, [7], None),
            SequenceChunk("last chunk", [21, 22], 3, (5, 8), WARM),
        ),
        4,
        torch.device("cpu"),
    )
    assert batch.token_ids.tolist() == [50, 11, 12, 13, 21, 22]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4]
    layout = batch.layout
    assert layout.query_start.tolist() == [0, 1, 4, 6]
    assert layout.seq_lens.tolist() == [7, 3, 5]
    assert layout.block_tables.tolist() == [[9, 4], [7, 0], [5, 8]]
    assert layout.slot_mapping.tolist() == [4 * 4 + 2, 28, 29, 30, 5 * 4 + 3, 8 * 4]
    assert (layout.max_query_len, layout.max_seq_len) == (3, 7)
    assert batch.sampled_rows.tolist() == [0, 5]
    assert [(c.request_id, c.sampling, c.sample_position) for c in batch.sampled] == [
        ("decode", GREEDY, 7), ("last chunk", WARM, 5),
    ]  # fmt: skip
    assert batch.targets == []
    assert {t.dtype for t in (batch.token_ids, batch.positions, layout.slot_mapping, batch.sampled_rows)} == {
        torch.int64
    }
    assert {t.dtype for t in (layout.query_start, layout.seq_lens, layout.block_tables)} == {torch.int32}


def test_padding_is_computed_and_not_sampled() -> None:
    batch = build_batch(
        plan(
            SequenceChunk("short", [1, 2, 0, 0], 0, [3], GREEDY, 2), SequenceChunk("long", [1, 2, 3, 4], 0, [1], GREEDY)
        ),
        4,
        torch.device("cpu"),
    )
    assert batch.layout.seq_lens.tolist() == [4, 4]
    assert batch.layout.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert batch.sampled_rows.tolist() == [1, 7]
    assert [chunk.sample_position for chunk in batch.sampled] == [2, 4]


def test_a_step_that_samples_nothing() -> None:
    batch = build_batch(plan(SequenceChunk("chunk", [1, 2], 2, [0], None)), 4, torch.device("cpu"))
    assert batch.sampled_rows.tolist() == []
    assert batch.sampled == []


def test_prompt_tokens_whose_logprobs_are_due_know_their_rows() -> None:
    first = SequenceChunk("a", [1, 2, 3], 0, [0], None, prompt_targets=PromptTargets(0, 0, [2, 3, 4]))
    again = SequenceChunk("b", [5, 6, 7, 8], 4, [1, 2], WARM, prompt_targets=PromptTargets(2, 2, [8]))
    batch = build_batch(plan(first, SequenceChunk("c", [9], 0, [3], GREEDY), again), 4, torch.device("cpu"))
    assert batch.targets == [(first, 0), (again, 6)]
    assert batch.sampled_rows.tolist() == [3, 7]


def test_kv_store() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=100,
    )
    store = KVStore(config, KVLayout(), num_blocks=5, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(store.layers) == 3
    for kv in store.layers:
        assert kv.key.shape == (5, 2, 4, 8)
        assert kv.value.shape == (5, 2, 4, 1, 8)
        assert kv.key.dtype == kv.value.dtype == torch.bfloat16
        assert kv.block_size == 4
        assert not kv.key.any()
        assert not kv.value.any()
    assert kv_bytes_per_token(config, torch.bfloat16) == 3 * 2 * 2 * 8 * 2
    assert sum(kv.key.nbytes + kv.value.nbytes for kv in store.layers) == 5 * 4 * kv_bytes_per_token(
        config, torch.bfloat16
    )
    store.layers[0].key[0] = 1
    assert not store.layers[1].key.any()
