"""Smoothing before int8: it changes nothing in exact arithmetic, and much in int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.model_driver import generate
from support.random_model import SIZES, cpu_attention, load, one_thread, random_model

from chairlift.model import fused as fused_module
from chairlift.model.fused import FusedCausalLM, unsupported
from chairlift.model.llama import CausalLM
from chairlift.model.smoothing import Rotation, smooth

PROMPTS = [[5, 3, 80], [(7 * i) % 90 for i in range(40)]]
NUM_TOKENS = 4
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-96-wide": (transformers.LlamaConfig, {"hidden_size": 96, "head_dim": 16}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 9}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> CausalLM:
    kind, changes = FAMILIES[family]
    random_model(kind(**SIZES | changes)).save_pretrained(directory)
    return load(directory, dtype)


def logits(model: CausalLM) -> torch.Tensor:
    return torch.cat([torch.stack(run.logits) for run in generate(model, PROMPTS, NUM_TOKENS)])


@pytest.mark.parametrize("size", [1, 7, 64, 96, 576, 8192])
def test_a_rotation_is_orthogonal_and_spreads_a_channel_over_all(size: int) -> None:
    few = torch.eye(size)[:50]
    rotated = Rotation(size)(few)
    torch.testing.assert_close(rotated @ rotated.T, torch.eye(len(few)), atol=1e-5, rtol=0)
    odd = size // (size & -size)
    assert float(rotated.abs().max()) <= (odd / size) ** 0.5 + 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_arithmetic_sees_no_difference(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, family)
    before, embedding = logits(model), model.embedding.clone()
    up = model.layers[0].gate_up.weight[128:].norm(dim=1)
    smooth(model)
    torch.testing.assert_close(logits(model), before, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(model.embedding, embedding, atol=0.1)
    if model.config.qk_norm:
        assert not torch.equal(model.layers[0].attention.q_norm.weight, torch.ones(model.config.head_dim))
    assert torch.equal(model.layers[0].attention_norm.weight, torch.ones(model.config.hidden_size))
    assert not torch.allclose(model.layers[0].gate_up.weight[128:].norm(dim=1), up, rtol=0.1)


def test_channels_that_nothing_uses_or_fills_do_no_harm(tmp_path: Path) -> None:
    model = make(tmp_path)
    with torch.no_grad():
        model.layers[0].gate_up.weight[128:160] = 0  # these rows of up
        model.layers[0].down.weight[:, 144:] = 0
        model.layers[0].down.weight[:, 16:48] = 0
    before = logits(model)
    smooth(model)
    torch.testing.assert_close(logits(model), before, atol=2e-4, rtol=1e-4)


def test_the_same_model_becomes_the_same(tmp_path: Path) -> None:
    first, second = make(tmp_path, dtype=torch.bfloat16), make(tmp_path, dtype=torch.bfloat16)
    smooth(first)
    torch.rand(1)  # the global generator is of no account
    smooth(second)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_of_nonsense_is_left_to_its_first_step(tmp_path: Path) -> None:
    model = make(tmp_path)
    model.norm.weight.data.fill_(float("nan"))
    smooth(model)
    assert logits(model).isnan().all()


OUTLIERS, LARGER = [3, 17, 40], 100


def residual_outliers(model: CausalLM) -> None:
    """Some channels of the residual stream that are far larger than the others, and read with weights far smaller."""
    model.embedding.data[:, OUTLIERS] *= LARGER
    for layer in model.layers:
        for reader in (layer.attention.qkv, layer.gate_up):
            reader.weight.data[:, OUTLIERS] /= LARGER
    model.head.weight.data[:, OUTLIERS] /= LARGER


def inner_outliers(model: CausalLM) -> None:
    """The same for what lies between up and down, where it changes nothing in exact arithmetic."""
    for layer in model.layers:
        layer.gate_up.weight.data[[128 + channel for channel in OUTLIERS]] *= LARGER
        layer.down.weight.data[:, OUTLIERS] /= LARGER


def int8_error(directory: Path, plant: Callable[[CausalLM], None]) -> float:
    """How far int8 logits are from exact ones, as a share of these."""
    model = make(directory)
    plant(model)
    exact = generate(model, PROMPTS, 1)
    attention = cpu_attention(model)
    near = generate(FusedCausalLM(model, attention, "int8"), PROMPTS, 1, block_size=16, attention=attention)
    wanted, got = (torch.stack([run.logits[0] for run in runs]) for runs in (exact, near))
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("plant", "fraction"), [(residual_outliers, 1 / 2), (inner_outliers, 1 / 4)])
def test_outliers_cost_int8_a_fraction_of_what_they_did(
    plant: Callable[[CausalLM], None], fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := unsupported(make(tmp_path).config, torch.float32, "int8"):
        pytest.skip(reason)
    smoothed = int8_error(tmp_path, plant)
    monkeypatch.setattr(fused_module, "smooth", lambda model: None)
    plain = int8_error(tmp_path, plant)
    assert smoothed < fraction * plain, (smoothed, plain)


def test_other_precisions_keep_their_weights(tmp_path: Path) -> None:
    model = make(tmp_path)
    before = model.embedding.clone()
    assert torch.equal(FusedCausalLM(model, cpu_attention(model)).embedding, before)
