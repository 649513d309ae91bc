"""A model that costs nothing to run, for tests in which the text does not matter."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TINY_MODEL_LEN = 1024


def save_tiny_model(directory: Path, *, backend: tokenizers.Tokenizer | None = None, eos_token_id: int = 257) -> None:
    """A Llama of a few thousand random weights whose tokens are bytes, or those of another tokenizer."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    vocabulary |= {"<|begin|>": 256, "<|end|>": 257}
    config = LlamaConfig(
        vocab_size=258 if backend is None else backend.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_MODEL_LEN,
        bos_token_id=256,
        eos_token_id=eos_token_id,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    if backend is not None:
        backend.save(str(directory / "tokenizer.json"))
        return
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    backend.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": template})
    )


def teach_tools(directory: Path) -> None:
    """Gives the model a chat template with tools, in the manner of Hermes."""
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = (
        "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    file.write_text(json.dumps(config))
