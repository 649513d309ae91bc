"""What smoothing measured, kept from one start to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chairlift.model import smoothing_cache
from chairlift.model.config import ModelConfig
from chairlift.model.llama import CausalLM
from chairlift.model.smoothing_cache import remembered

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


class Measurement:
    """Another result each time."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Tensor:
        self.times += 1
        return torch.rand(3, 64, generator=torch.Generator().manual_seed(self.times))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(smoothing_cache, "WORTH_BYTES", 0)
    model = CausalLM(replace(CONFIG), dtype=torch.bfloat16, device=torch.device("cpu"))
    for index, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    return model


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "smoothing").iterdir())


def test_the_second_start_finds_the_very_numbers_of_the_first(model: CausalLM, tmp_path: Path):
    measure = Measurement()
    first = remembered(model, measure)
    again = remembered(model, measure)
    assert measure.times == 1
    assert torch.equal(first, again)
    again.mul_(2)  # it belongs to the caller
    assert torch.equal(remembered(model, measure), first)
    assert len(files(tmp_path)) == 1


def test_other_weights_another_configuration_or_version_are_measured_anew(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
):
    measure = Measurement()
    remembered(model, measure)
    weight = next(iter(model.layers)).down.weight  # type: ignore[union-attr]
    weight.data[5, 7] += 1
    remembered(model, measure)
    assert measure.times == 2
    weight.data[[0, 1]] = weight.data[[1, 0]]
    remembered(model, measure)
    assert measure.times == 3
    object.__setattr__(model.config, "rope_theta", 5.0)
    remembered(model, measure)
    assert measure.times == 4
    monkeypatch.setattr(torch, "__version__", "another")
    remembered(model, measure)
    assert measure.times == 5


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_written_anew(model: CausalLM, tmp_path: Path, damage: bytes | None):
    measure = Measurement()
    remembered(model, measure)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content if damage is None else damage)
    second = remembered(model, measure)
    assert measure.times == 2
    assert torch.equal(remembered(model, measure), second)
    assert measure.times == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(model: CausalLM, tmp_path: Path):
    (tmp_path / "smoothing").write_text("not a folder")
    measure = Measurement()
    assert torch.equal(remembered(model, measure), Measurement()())
    remembered(model, measure)
    assert measure.times == 2


def test_a_write_that_fails_leaves_nothing_behind(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    remembered(model, Measurement())
    assert files(tmp_path) == []


def test_small_models_are_not_kept(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smoothing_cache, "WORTH_BYTES", model.weight_bytes + 1)
    measure = Measurement()
    remembered(model, measure)
    remembered(model, measure)
    assert measure.times == 2
    assert not (tmp_path / "smoothing").exists()
