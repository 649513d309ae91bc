"""Small models of any family whose every number is random, and what they need to run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from chairlift.model.attention.cpu import CpuAttention
from chairlift.model.config import read_config
from chairlift.model.llama import CausalLM
from chairlift.model.registry import load_model
from chairlift.model.source import resolve

# Multiples of 32, which steps in one kernel need.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def random_model(config: transformers.PreTrainedConfig, std: float = 0.2) -> transformers.PreTrainedModel:
    """Biases and norms are random too: none may be left out unnoticed."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=std)
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    source = resolve(str(directory), None)
    return load_model(source, read_config(source), dtype=dtype, device=torch.device("cpu"))


def cpu_attention(model: CausalLM, block_size: int = 16) -> CpuAttention:
    config = model.config
    return CpuAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=model.embedding.dtype,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that share such small tensors only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
