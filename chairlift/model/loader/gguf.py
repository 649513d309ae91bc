"""Tensors of a GGUF file, dequantized and under the names that ``transformers`` gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from chairlift.model.config import ModelConfig
from chairlift.model.gguf_file import GGUFFile, GGUFTensor
from chairlift.model.source import ModelError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
ROPE_FREQS = "rope_freqs.weight"  # part of the configuration


def iterate_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and float32 values of every tensor, dequantized as they are asked for.

    Names that are not known come as they are, for the loader to refuse.

    Raises:
        ModelError: a tensor is quantized in a way that cannot be undone here.
    """
    interleaved = file.metadata["general.architecture"] == "llama"
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:
            continue
        values = _dequantize(tensor)
        if interleaved and ".attn_q." in name:
            values = _undo_interleaving(values, config.num_heads)
        elif interleaved and ".attn_k." in name:
            values = _undo_interleaving(values, config.num_kv_heads)
        yield _checkpoint_name(name), values


def _dequantize(tensor: GGUFTensor) -> Tensor:
    try:
        values = dequantize(tensor.data, tensor.quantization)
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {tensor.name} is quantized as {tensor.quantization.name}, which is not supported; take a file in "
            "Q4_0, Q4_1, Q8_0, a K-quant, F16, BF16 or F32"
        ) from error
    # What is float32 already comes as a view of the file, which may not be written to.
    writable = np.require(values, requirements="W")
    return torch.from_numpy(writable).view(tensor.shape)


def _undo_interleaving(values: Tensor, num_heads: int) -> Tensor:
    """Puts the rows of each head of a llama file back in order.

    Such files rotate neighbours (2i, 2i + 1), and have the rows laid out for it; here i and i + head_dim / 2 are
    rotated, as in ``transformers``.
    """
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def _checkpoint_name(name: str) -> str:
    match = TENSOR_NAME.fullmatch(name)
    if match is None or match["part"] not in NAMES:
        return name
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{NAMES[match['part']]}.{match['kind']}"
