"""Tensors of a GGUF file, dequantized and under the names that ``transformers`` gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray
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


class DequantizedTensor:
    """A :class:`~chairlift.model.loader.weights.StoredTensor` of a GGUF file: float32, whatever it is stored as.

    Args:
        tensor: as stored.
        interleaved: width of its heads, where their rows are interleaved; else ``None``.
    """

    def __init__(self, tensor: GGUFTensor, interleaved: int | None = None) -> None:
        self._tensor = tensor
        self._interleaved = interleaved

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._tensor.shape

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The values of a part: whole heads, where they are interleaved.

        Rows are dequantized alone, and of a row the blocks that hold what is asked for.

        Raises:
            ModelError: the tensor is quantized in a way that cannot be undone here.
        """
        *rows, columns = index
        block, block_bytes = GGML_QUANT_SIZES[self._tensor.quantization]
        first, last = columns.start // block, -(-columns.stop // block)
        data = self._tensor.data[(*rows, slice(first * block_bytes, last * block_bytes))]
        values = self._dequantize(np.ascontiguousarray(data))
        values = values[..., columns.start - first * block : columns.stop - first * block]
        return values if self._interleaved is None else _undo_interleaving(values, self._interleaved)

    def _dequantize(self, data: NDArray[np.uint8]) -> Tensor:
        tensor = self._tensor
        try:
            values = dequantize(data, tensor.quantization)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {tensor.name} is quantized as {tensor.quantization.name}, which is not supported; take a file "
                "in Q4_0, Q4_1, Q8_0, a K-quant, F16, BF16 or F32"
            ) from error
        # What is float32 already comes as a view of the file, which may not be written to.
        return torch.from_numpy(np.require(values, requirements="W"))


def iterate_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, DequantizedTensor]]:
    """Yields every tensor by name; ``config`` is the whole model's.

    Names that are not known come as they are, for the loader to refuse.
    """
    llama = file.metadata["general.architecture"] == "llama"
    for name, tensor in file.tensors.items():
        if name != ROPE_FREQS:
            interleaved = llama and (".attn_q." in name or ".attn_k." in name)
            yield _checkpoint_name(name), DequantizedTensor(tensor, config.head_dim if interleaved else None)


def _undo_interleaving(values: Tensor, head_dim: int) -> Tensor:
    """Puts the rows of each head of a llama file back in order.

    Such files rotate neighbours (2i, 2i + 1), and have the rows laid out for it; here i and i + head_dim / 2 are
    rotated, as in ``transformers``.
    """
    pairs = values.view(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def _checkpoint_name(name: str) -> str:
    match = TENSOR_NAME.fullmatch(name)
    if match is None or match["part"] not in NAMES:
        return name
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{NAMES[match['part']]}.{match['kind']}"
