"""The built-in model against ``transformers``, which reads the same file with code of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.likelihoods import expected_log_likelihood, log_likelihoods
from support.model_driver import generate
from support.server import running_server
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from chairlift.model.config import read_config
from chairlift.model.gguf_file import open_gguf
from chairlift.model.llama import CausalLM
from chairlift.model.loader.gguf import iterate_gguf
from chairlift.model.registry import load_model
from chairlift.model.source import resolve

REQUESTS = Path(__file__).parents[2] / "benchmarks" / "data" / "requests.json"
NUM_PROMPTS = 20
NUM_TOKENS = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    source = resolve("smollm2")
    return load_model(source, read_config(source), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    """The architecture as published, with the weights that ``transformers`` reads from the file."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    published = transformers.LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(resolve("smollm2").path, return_tensors=True, model_to_load=published)["tensors"]
    assert published.load_state_dict(tensors, strict=False) == (["lm_head.weight"], [])  # tied
    return published


def make_prompts() -> list[list[int]]:
    """Cut from real requests, of as many lengths as there are prompts: 1 token to about 100."""
    requests = json.loads(REQUESTS.read_text())["reqs"]
    longest = sorted((request["prompt"] for request in requests), key=len, reverse=True)
    return [prompt[: 1 + 5 * i] for i, prompt in enumerate(longest[:NUM_PROMPTS])]


def test_weights_equal_those_that_transformers_reads(reference: transformers.PreTrainedModel) -> None:
    source = resolve("smollm2")
    stored = dict(iterate_gguf(open_gguf(source.path), read_config(source)))
    ours = {name: tensor.read(tuple(slice(0, n) for n in tensor.shape)) for name, tensor in stored.items()}
    theirs = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


def test_greedy_tokens_equal_transformers(model: CausalLM, reference: transformers.PreTrainedModel) -> None:
    prompts = make_prompts()
    assert len({len(prompt) for prompt in prompts}) == NUM_PROMPTS
    for prompt, ours in zip(prompts, generate(model, prompts, NUM_TOKENS, chunk=48, block_size=16), strict=True):
        # One pass over prompt and output says what transformers takes after each token, given those before; as the
        # first of ours equals its own, so do the tokens it goes on from, and so on to the last.
        with torch.inference_mode():
            logits = reference(torch.tensor([ours.tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert ours.generated == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(ours.logits), logits, atol=5e-3, rtol=1e-3)


def test_log_likelihoods_over_http_equal_transformers(reference: transformers.PreTrainedModel, tmp_path: Path) -> None:
    pairs = [(prompt[: len(prompt) // 2], prompt[len(prompt) // 2 :]) for prompt in make_prompts()[1::3]]
    expected = [expected_log_likelihood(reference, *pair) for pair in pairs]
    arguments = ("smollm2", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8")
    with running_server(tmp_path / "steps.jsonl", *arguments) as server:
        assert log_likelihoods(server, "smollm2", pairs) == pytest.approx(expected, abs=1e-2)


def test_settings(model: CausalLM) -> None:
    config = model.config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0))
    assert config.max_position_embeddings == 8192
    assert model.weight_bytes == 134_515_008 * 4
