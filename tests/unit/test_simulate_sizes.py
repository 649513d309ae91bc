"""Shapes, memory and lengths: the numbers that a plan is made of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from chairlift.config import ConfigError
from chairlift.model.source import ModelError
from chairlift.simulate.catalogue import HARDWARE, MODELS, find_hardware, find_model
from chairlift.simulate.lengths import Lengths, draw_lengths
from chairlift.simulate.sizes import KV_BYTES, KV_SCALE_BYTES, PRECISIONS, Deployment

A100 = HARDWARE["a100-80g"]


def deployment(model: str = "llama-2-13b", **changes) -> Deployment:
    return Deployment(**{"model": MODELS[model], "hardware": A100, "max_model_len": 4096, **changes})


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("codellama-13b", 13016.0),
        ("codellama-34b", 33744.0),
        ("llama-2-7b", 6738.4),
        ("llama-2-70b", 68976.6),
        ("llama-3-8b", 8030.3),
        ("llama-3-70b", 70553.7),
        ("llama-3.2-1b", 1235.8),
        ("llama-3.2-3b", 3212.7),
        ("mistral-7b", 7248.0),
        ("qwen2.5-0.5b", 494.0),
        ("qwen2.5-7b", 7615.6),
        ("qwen2.5-72b", 72706.2),
        ("qwen3-0.6b", 596.0),
        ("qwen3-8b", 8190.7),
        ("qwen3-32b", 32762.1),
        ("smollm2-135m", 134.5),
        ("smollm2-1.7b", 1711.4),
    ],
)
def test_a_shape_has_as_many_weights_as_the_published_model(name: str, millions: float):
    sized = deployment(name)
    assert (sized.layer_weights + sized.other_weights) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_bytes_of_keys_and_values():
    assert deployment("llama-2-7b").kv_bytes_per_token == 32 * 2 * 32 * 128 * 2
    assert deployment("llama-3-8b").kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert deployment("llama-2-70b", tensor_parallel_size=4).kv_bytes_per_token == 80 * 2 * 2 * 128 * 2
    assert deployment("llama-3-8b", kv_itemsize=1).kv_bytes_per_token == 65536


def test_an_int8_cache_has_a_scale_for_each_token_and_head():
    int8 = {"kv_itemsize": KV_BYTES["int8"], "kv_scale_bytes": KV_SCALE_BYTES["int8"]}
    one = deployment("llama-3-8b", **int8)
    assert one.kv_bytes_per_token == 32 * 2 * 8 * (128 + 4) == 67_584
    assert deployment("llama-3-8b", tensor_parallel_size=2, **int8).kv_bytes_per_token == 67_584 // 2
    assert one.num_blocks == one.kv_budget // (16 * 67_584)
    assert deployment("llama-3-8b", swap_space=1.0, **int8).num_host_blocks == 2**30 // (16 * 67_584)
    assert set(KV_SCALE_BYTES) == {"int8"}, "the other precisions have none"


def test_devices_share_the_matrices_and_the_heads():
    one, two = deployment(), deployment(tensor_parallel_size=2)
    assert two.layer_weights * 2 == one.layer_weights
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=1e-3)
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    # Eight key/value heads cannot be split over sixteen devices: each has a copy of one.
    assert deployment("llama-2-70b", tensor_parallel_size=16).kv_heads == 1


def test_precision_halves_what_it_applies_to():
    whole, half = deployment(), deployment(precision=PRECISIONS["int8"])
    assert half.weight_bytes == whole.layer_weights + 2 * whole.other_weights
    assert deployment(precision=PRECISIONS["float32"]).weight_bytes == 2 * whole.weight_bytes


def test_the_budget_is_what_is_left():
    d = deployment(tensor_parallel_size=2)
    used = d.weight_bytes + d.context_bytes + d.activation_bytes
    assert d.kv_budget == int(A100.memory_bytes * 0.9) - used
    assert d.num_blocks == d.kv_budget // (16 * d.kv_bytes_per_token)
    assert d.weights_fit
    assert not deployment("llama-2-70b").weights_fit
    assert deployment("llama-2-70b").num_blocks == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, "does not divide the model's 40 query heads evenly; use 1, 2, 4, 5, 8, 10"),
        ({"tensor_parallel_size": 0}, "does not divide"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"max_model_len": 5000}, "longer than the 4096 positions"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, r"\(32\) must be at least --max-num-seqs \(64\)"),
        ({"swap_space": -1.0}, "at least 0 GiB"),
        ({"precision": PRECISIONS["fp8"]}, "has no fp8 arithmetic; use --dtype int8"),
    ],
)
def test_impossible_deployments_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        deployment(**changes)


def test_names_that_are_unknown_are_answered_with_those_that_are():
    with pytest.raises(ConfigError, match="choose from a100-40g, a100-80g, h100, h200, l4, l40s, this"):
        find_hardware("b200")
    with pytest.raises(ConfigError, match="codellama-13b"):
        find_model("gpt-5")
    assert find_hardware("H200").memory_bytes > 139e9
    assert find_hardware("this").memory_bytes > 0
    assert find_model("Llama-2-7B") is MODELS["llama-2-7b"]
    assert find_model("smollm2") is MODELS["smollm2-135m"]


def test_a_directory_needs_no_more_than_its_configuration(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        find_model(str(tmp_path))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_model(str(tmp_path))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (32, 32, 128)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("300", 300, 0),
        ("exponential:200", 200, 200),
        ("lognormal:220:1.2", 220, 264),
        ("uniform:10:30", 20, 6.06),
    ],
)
def test_distributions_have_the_moments_that_they_name(text: str, mean: float, deviation: float):
    drawn = np.array(draw_lengths(text, "1", 50_000, seed=1).pairs)[:, 0]
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.05, abs=0.01)
    assert drawn.min() >= 1


def test_a_cap_cuts_the_tail():
    assert max(prompt for prompt, _ in draw_lengths("lognormal:220:1.2:500", "5", 5000).pairs) == 500
    assert max(output for _, output in draw_lengths("5", "exponential:100:150", 5000).pairs) == 150


@pytest.mark.parametrize(
    "text", ["", "abc", "normal:5:1", "-3", "0", "nan", "lognormal:5", "uniform:9:3", "exponential:1:2:3", "5:5", "inf"]
)
def test_lengths_written_wrongly_are_refused(text: str):
    with pytest.raises(ConfigError, match="is no length: write N"):
        draw_lengths(text, "5", 10)


def test_the_resident_length_is_what_a_random_step_finds():
    lengths = Lengths([(10, 100), (300, 4), (50, 50)], "three")
    held = [prompt + step + 0.5 for prompt, output in lengths.pairs for step in range(output)]
    assert lengths.mean_resident == pytest.approx(np.mean(held))
    assert lengths.mean == pytest.approx((110 + 304 + 100) / 3)
    assert lengths.longest == 304


def test_sequences_longer_than_the_model_are_cut_and_that_is_said():
    lengths = Lengths([(10, 10), (90, 50), (500, 5)], "mine").clip(100)
    assert lengths.pairs == [(10, 10), (90, 10), (99, 1)]
    assert "2 of 3 cut to 100 tokens" in lengths.description
    assert lengths.clip(100) is lengths
