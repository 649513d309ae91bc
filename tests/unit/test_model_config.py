"""Settings that are read from config.json, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.model.config import ModelConfig, from_hf, read_config
from chairlift.model.source import ModelError, ModelSource

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_shape() -> None:
    config = from_hf(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.sliding_windows) == (16, 2, (None, None))
    assert from_hf({**LLAMA, "head_dim": None}).head_dim == 16
    assert from_hf({**LLAMA, "head_dim": 32}).head_dim == 32
    assert from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4
    assert from_hf({**LLAMA, "architectures": None, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_windows_of_checkpoints_without_layer_types() -> None:
    """As Qwen's own checkpoints are: a window is stated, and mostly not used."""
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8}
    used = {"use_sliding_window": True, "max_window_layers": 1}
    assert from_hf({**qwen, **used}).sliding_windows == (None, 8, 8, 8)
    assert from_hf({**qwen, **used, "use_sliding_window": False}).sliding_windows == (None,) * 4
    assert from_hf({**qwen, "use_sliding_window": True}).sliding_windows == (None,) * 4
    assert from_hf({**qwen, **used, "sliding_window": None}).sliding_windows == (None,) * 4
    assert from_hf({**qwen, "architectures": ["LlamaForCausalLM"]}).sliding_windows == (None,) * 4
    assert from_hf({**qwen, "architectures": ["MistralForCausalLM"]}).sliding_windows == (8,) * 4


def test_eos_tokens_of_both_files() -> None:
    assert from_hf({**LLAMA, "eos_token_id": 9}).eos_token_ids == (9,)
    assert from_hf({**LLAMA, "eos_token_id": [9, 8]}, {"eos_token_id": [8, 7]}).eos_token_ids == (9, 8, 7)
    assert from_hf({**LLAMA, "eos_token_id": None}, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert from_hf({**LLAMA, "eos_token_id": None, "bos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "dynamic", "factor": 2.5}, 250),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 4.0}, 400),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50, **LLAMA3}, 100),
    ],
)
def test_longest_sequence(rope: dict[str, Any], length: int) -> None:
    new = from_hf({**LLAMA, "rope_parameters": {"rope_theta": 5e5, **rope}})
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**rope, "type": rope["rope_type"]}})
    assert new == old
    assert new.max_position_embeddings == length
    assert new.rope_theta == 5e5
    assert (new.rope_scaling or {"rope_type": "default"})["rope_type"] == rope["rope_type"]


def test_longrope_takes_its_factor_from_the_lengths() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = from_hf({**LLAMA, "original_max_position_embeddings": 25, "rope_scaling": rope})
    assert config.rope_scaling is not None
    assert config.rope_scaling["factor"] == 4.0
    assert config.max_position_embeddings == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"MixtralForCausalLM is not supported; supported: LlamaForCausalLM, M",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"architectures": [], "model_type": "gpt2"}, "Gpt2ForCausalLM is not supported"),
        ({"architectures": None}, "none is named"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'.*unquantized"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 15}, "must be even, not 15"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "su"}}, "'su' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "'factor', a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "a list of 8 numbers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            "chunked_attention",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 sliding windows for 2 layers",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window = -1"),
        ({"eos_token_id": "x"}, "'x' where a token id"),
        ({"eos_token_id": [2, None]}, "where a token id"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_unreadable_files(content: str, tmp_path: Path) -> None:
    source = ModelSource("m", "safetensors", tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(source)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert isinstance(read_config(source), ModelConfig)
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_config(source)
