"""Writes a model of the comparison in the forms that have no tool of their own: safetensors, and int8 for vLLM.

    python benchmarks/peers_models.py smollm2        # the built-in model
    python benchmarks/peers_models.py random-0.5b    # random weights in the shape of Qwen2.5-0.5B, SmolLM2's tokenizer

Both go to $PEERS_ROOT/models/NAME; docs/peers.md says how the forms of the other peers are made from `safetensors`.
Needs the dev extra.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
import transformers
from offline import to_transformers
from safetensors.torch import load_file, save_file

from chairlift.model.source import resolve

# Weights by output channel, activations by token as they come; the output head is left as it is.
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def random_model() -> transformers.PreTrainedModel:
    """Qwen2.5-0.5B's shape with SmolLM2's vocabulary, bf16, the same weights every time."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=49152,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.02,
    )
    return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)


def write_safetensors(name: str, directory: Path) -> None:
    """The model in bf16, with its tokenizer, as transformers writes it."""
    model = random_model() if name == "random-0.5b" else to_transformers(name, torch.bfloat16)
    model.save_pretrained(directory)
    source = resolve("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.save_pretrained(directory)


def write_w8a8(safetensors: Path, directory: Path) -> None:
    """The layers' weights in int8 with a scale for each output channel, in the layout of compressed-tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in safetensors.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
    tensors = {}
    for name, tensor in load_file(safetensors / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((safetensors / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": W8A8}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "random-0.5b"))
    name = parser.parse_args().model
    directory = Path(os.environ.get("PEERS_ROOT", "peers")) / "models" / name
    write_safetensors(name, directory / "safetensors")
    write_w8a8(directory / "safetensors", directory / "w8a8")
    print(f"{directory}: safetensors, w8a8")


if __name__ == "__main__":
    main()
