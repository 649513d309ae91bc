"""Checkpoints that do not fit: the tensor or the file at fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chairlift.model.config import ModelConfig
from chairlift.model.llama import CausalLM
from chairlift.model.registry import load_model
from chairlift.model.source import ModelError, ModelSource

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


def make_config(**changes: object) -> ModelConfig:
    shape: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 32,
    }
    return ModelConfig(**{**shape, **changes})  # type: ignore[arg-type]


def make_tensors(config: ModelConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    slots = CausalLM(config, dtype=torch.float32, device=CPU).slots()
    return {name: torch.randn(slot.shape) for name, slot in slots.items()}


def load(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(ModelSource("m", "safetensors", path), config, dtype=dtype, device=CPU)


def assert_holds(model: CausalLM, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    for name, slot in model.slots().items():
        torch.testing.assert_close(slot.tensor, tensors[name].to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_reaches_its_place(dtype: torch.dtype, tmp_path: Path) -> None:
    config = make_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    tensors = make_tensors(config)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path, config, dtype), tensors, dtype)


def test_stored_frequencies_are_of_no_use(tmp_path: Path) -> None:
    tensors = make_tensors(make_config())
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "a.safetensors")
    assert_holds(load(tmp_path, make_config()), tensors)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"lacks {Q}$"),
        (lambda t: [t.pop(name) for name in list(t)[3:15]], r"lacks .* and 4 more"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[Q].clone()}),
            "no place for, model.layers.2.mlp.up_proj",
        ),
        (lambda t: t.update({Q: t[Q][:8].clone()}), rf"{Q} has the shape \[8, 16\].*gives \[16, 16\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), rf"{Q} is stored as torch.int8"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), rf"{Q} is stored as torch.float8_e4m3fn"),
    ],
)
def test_tensors_that_do_not_fit(change: Change, message: str, tmp_path: Path) -> None:
    tensors = make_tensors(make_config())
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path, make_config())


@pytest.mark.parametrize("stored", [{HEAD}, {EMBEDDING}, {HEAD, EMBEDDING}])
def test_tied_head_under_either_name(stored: set[str], tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    kept = {name: t for name, t in tensors.items() if name in stored or name not in (HEAD, EMBEDDING)}
    save_file(kept, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path, config), tensors)


def test_tied_heads_that_differ(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    save_file(make_tensors(config), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(tmp_path, config)


def test_neither_head_nor_embedding(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    save_file({name: t for name, t in tensors.items() if name not in (HEAD, EMBEDDING)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks {EMBEDDING}"):
        load(tmp_path, config)


def test_shards(tmp_path: Path) -> None:
    config = make_config()
    tensors = make_tensors(config)
    names = list(tensors)
    weight_map = {name: f"{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    # A copy in one file, as some repositories have beside the shards, is not read too.
    save_file(tensors, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(load(tmp_path, config), tensors)

    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1\.safetensors"):
        load(tmp_path, config)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        load(tmp_path, config)


@pytest.mark.parametrize("length", [0, 5, 100, -10])
def test_file_cut_short(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_tensors(make_config()), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut short or damaged"):
        load(tmp_path, make_config())


def test_unsupported_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="PhiForCausalLM is not supported; supported: LlamaForCausalLM"):
        load(tmp_path, make_config(architecture="PhiForCausalLM"))
