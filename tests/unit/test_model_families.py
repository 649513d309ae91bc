"""Every family and variation against ``transformers``: same greedy tokens and logits, from a saved checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.model_driver import generate
from support.random_model import load, one_thread, random_model

from chairlift.model.config import read_config
from chairlift.model.registry import load_model
from chairlift.model.source import resolve

VOCAB_SIZE = 97
NUM_TOKENS = 32
# Below 16, where transformers puts back the frequencies that a longer sequence before made it change.
PROMPT_LENGTHS = (1, 7, 15)
CPU = torch.device("cpu")
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Llama, Mistral = transformers.LlamaConfig, transformers.MistralConfig
Qwen2, Qwen3 = transformers.Qwen2Config, transformers.Qwen3Config
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 4.0, 7.0]}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def rope(kind: str, theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-gqa": (Llama, {}),
    "llama-mha": (Llama, {"num_key_value_heads": 4}),
    "llama-mqa": (Llama, {"num_key_value_heads": 1}),
    "llama-tied": (Llama, {"tie_word_embeddings": True}),
    "llama-attention-bias": (Llama, {"attention_bias": True}),
    "llama-mlp-bias": (Llama, {"mlp_bias": True}),
    "llama-head-dim": (Llama, {"head_dim": 16}),
    "llama-eps": (Llama, {"rms_norm_eps": 0.1}),
    "codellama": (Llama, {"num_key_value_heads": 4, **rope("default", theta=1e6)}),
    "llama-linear": (Llama, rope("linear", factor=4.0)),
    "llama-dynamic": (Llama, {"max_position_embeddings": 16, **rope("dynamic", factor=2.0)}),
    "llama-yarn": (Llama, rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-betas": (
        Llama,
        rope("yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=2.0, beta_slow=0.5, truncate=False),
    ),
    "llama-yarn-attention-factor": (
        Llama,
        rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.7),
    ),
    "llama-yarn-mscale": (
        Llama,
        rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.5, mscale_all_dim=0.5),
    ),
    "llama3": (
        Llama,
        rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama-longrope": (Llama, rope("longrope", factor=8.0, original_max_position_embeddings=16, **LONG)),
    "mistral-full": (Mistral, {"sliding_window": None}),
    "mistral-window": (Mistral, {"sliding_window": 6}),
    "qwen2": (Qwen2, {}),
    "qwen2-tied": (Qwen2, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-unused-window": (Qwen2, {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-layer-types": (
        Qwen2,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (Qwen3, {"head_dim": 12}),
    "qwen3-bias": (Qwen3, {"head_dim": 8, "attention_bias": True}),
    "qwen3-window": (
        Qwen3,
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
}


def make_reference(config: Any) -> transformers.PreTrainedModel:
    model = random_model(config, std=0.3)
    model.generation_config.eos_token_id = None  # so that it always generates as many tokens as it is asked for
    return model.eval()


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def reference_generation(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits [num_tokens, vocab] that they come from."""
    ids = torch.tensor([prompt])
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def assert_equal_to(reference: transformers.PreTrainedModel, path: Path) -> None:
    prompts = make_prompts()
    for prompt, ours in zip(prompts, generate(load(path), prompts, NUM_TOKENS), strict=True):
        tokens, logits = reference_generation(reference, prompt, NUM_TOKENS)
        torch.testing.assert_close(torch.stack(ours.logits), logits, atol=2e-4, rtol=1e-4)
        assert ours.generated == tokens
        assert len(set(tokens)) > 3, "a model that repeats itself shows little"


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    make_config, changes = CASES[case]
    reference = make_reference(make_config(**{**BASE, **changes}))
    reference.save_pretrained(tmp_path)
    assert_equal_to(reference, tmp_path)


def test_sharded(tmp_path: Path) -> None:
    reference = make_reference(Llama(**BASE))
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_to(reference, tmp_path)


def test_config_of_transformers_4(tmp_path: Path) -> None:
    changes = rope("yarn", theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    reference = make_reference(Llama(**BASE, **changes))
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    path.write_text(json.dumps(config))
    assert_equal_to(reference, tmp_path)


def test_silent_config_takes_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Only what differs from the class's defaults is written down: the rest has to be known here."""
    for make_config in (Llama, Mistral, Qwen2, Qwen3):
        config = make_config(**{**BASE, "num_attention_heads": 64, "hidden_size": 128})
        written = {key: config.to_dict()[key] for key in (*list(BASE)[:5],)}
        written["architectures"] = [make_config.__name__.replace("Config", "ForCausalLM")]
        (tmp_path / "config.json").write_text(json.dumps(written))
        (tmp_path / "model.safetensors").touch()
        ours = read_config(resolve(str(tmp_path)))
        theirs = make_config(**{key: written[key] for key in list(BASE)[:5]})
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128 // 64)
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_windows == (theirs.sliding_window if make_config is Mistral else None,) * 3
        assert ours.bos_token_id == theirs.bos_token_id
        assert list(ours.eos_token_ids) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])


def test_chunks_and_batch_mates_change_nothing(tmp_path: Path) -> None:
    """Dynamic scaling depends on the length, and the length must be the sequence's own."""
    for changes in (
        rope("dynamic", factor=2.0),
        rope("longrope", factor=8.0, original_max_position_embeddings=16, **LONG),
    ):
        make_reference(Llama(**{**BASE, "max_position_embeddings": 16, **changes})).save_pretrained(tmp_path)
        source = resolve(str(tmp_path))
        model = load_model(source, read_config(source), dtype=torch.float32, device=CPU)
        prompts = [[*prompt, *range(3, 30)] for prompt in make_prompts()]
        together = generate(model, prompts, 8, chunk=5)
        for prompt, mixed in zip(prompts, together, strict=True):
            (alone,) = generate(model, [prompt], 8, chunk=64)
            torch.testing.assert_close(torch.stack(mixed.logits), torch.stack(alone.logits), atol=1e-4, rtol=1e-4)


def test_low_precision_stays_close(tmp_path: Path) -> None:
    reference = make_reference(Llama(**BASE))
    reference.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    exact = load_model(source, read_config(source), dtype=torch.float32, device=CPU)
    rough = load_model(source, read_config(source), dtype=torch.bfloat16, device=CPU)
    assert rough.weight_bytes * 2 == exact.weight_bytes
    prompt = make_prompts()[2]
    (a,), (b,) = generate(exact, [prompt], 1), generate(rough, [prompt], 1)
    assert b.logits[0].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(a.logits[0], b.logits[0], dim=0) > 0.99


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes(tied: bool, tmp_path: Path) -> None:
    reference = make_reference(Llama(**BASE, tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    model = load_model(source, read_config(source), dtype=torch.float32, device=CPU)
    assert model.weight_bytes == sum(p.numel() * 4 for p in reference.parameters())
