"""Makes a decoder easier to compute in int8 without changing what it computes.

A product in int8 has one scale for a whole row of activations. It has to reach the row's largest number, so a few
channels that stand out coarsen all others. Two changes even the channels out, and both end up in the weights:

- The residual stream is rotated (QuaRot, arXiv:2404.00456). An RMSNorm without weights of its own gives the same for a
  rotated row, rotated; so its weights are folded into the projections that read it, these are rotated along their
  inputs, and whatever writes to the stream along its outputs.
- What lies between up and down cannot be rotated, for SwiGLU multiplies channel by channel. There each channel is
  divided by a factor, in the rows of up, and its column of down is multiplied by it (SmoothQuant, arXiv:2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from chairlift.model.attention.base import BatchLayout, LayerKVs, kv_width
from chairlift.model.attention.reference import ReferenceAttention
from chairlift.model.layers import Linear
from chairlift.model.llama import CausalLM, DecoderLayer
from chairlift.model.smoothing_cache import remembered

SEED = 0
# A Hadamard matrix of 4,096 is applied as two of 64: few operations, in products large enough to be fast.
LARGEST_FACTOR = 64
ROWS_AT_ONCE = 512
"""Weights are rotated in float32, and so many rows or columns of them at a time."""
SEQUENCES, LENGTH, PASSES = 8, 32, 2
"""How much a model writes to be measured on, and how often it does so anew."""
SMALLEST = 1e-3
"""The smallest factor, as a share of the median, and the inverse of the largest: some channels are never used."""
TINY = 1e-12


@torch.no_grad()
def smooth(model: CausalLM) -> None:
    """Changes the weights in place. The same model always becomes the same.

    Scores stay what they were but for rounding; hidden states are rotated, and a tied head is tied no more.

    Args:
        model: whole, with its weights loaded, on the CPU.
    """
    _rotate_residual_stream(model)
    _scale_inner_channels(model)


class Rotation:
    """An orthogonal matrix that spreads every channel over all others, as a product of small ones.

    It is H ⊗ O after random signs: H a Hadamard matrix as large as ``size`` allows, O random for the odd factor left.
    """

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        self._factors = []
        odd = size
        while odd % 2 == 0:
            factor = min(LARGEST_FACTOR, odd & -odd)
            self._factors.append(_hadamard(factor))
            odd //= factor
        if odd > 1:
            normal = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
            self._factors.append(torch.linalg.qr(normal).Q.float())

    def __call__(self, rows: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        """[n, size] to the same in float32, rotated, each column scaled before."""
        rotated = (rows * (self._signs * scale)).contiguous()  # else products of columns go row by row
        for factor in self._factors:
            # Turns the last digits of a channel's number, and puts them in front: after all factors, all were turned.
            digits = rotated.reshape(len(rows), -1, len(factor)) @ factor
            rotated = digits.transpose(1, 2)
        turned: Tensor = rotated.reshape(rows.shape)
        return turned


def _hadamard(size: int) -> Tensor:
    """A Hadamard matrix of a power of two (Sylvester's), scaled to be orthogonal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix * size**-0.5
    return scaled


def _rotate_residual_stream(model: CausalLM) -> None:
    rotate = Rotation(model.config.hidden_size)
    # The final norm's weights go into the head, which therefore needs numbers of its own.
    model.head.weight = nn.Parameter(model.head.weight.data.clone(), requires_grad=False)
    _rotate_inputs(model.head, model.norm.weight, rotate)
    _in_pieces(model.embedding.data, rotate)
    for layer in _layers(model):
        _rotate_inputs(layer.attention.qkv, layer.attention_norm.weight, rotate)
        _rotate_outputs(layer.attention.o, rotate)
        _rotate_inputs(layer.gate_up, layer.mlp_norm.weight, rotate)
        _rotate_outputs(layer.down, rotate)


def _rotate_inputs(projection: Linear, norm: Tensor, rotate: Rotation) -> None:
    """Of a projection that reads the stream through a norm, whose weights become ones."""
    wide = norm.float()
    _in_pieces(projection.weight.data, lambda rows: rotate(rows, wide))
    norm.fill_(1)


def _rotate_outputs(projection: Linear, rotate: Rotation) -> None:
    _in_pieces(projection.weight.data.T, rotate)
    if projection.bias is not None:
        _in_pieces(projection.bias.data[None], rotate)


def _in_pieces(weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    for rows in torch.split(weight, ROWS_AT_ONCE):
        rows.copy_(change(rows))


def _scale_inner_channels(model: CausalLM) -> None:
    """Divides what ``down`` takes by a factor for each channel.

    With steps in proportion to a row's root mean square, the error of a product is least where the factor of channel j
    is the root of ``rms(X_j) / ‖W_j‖``: the minimum of Σ (X_j / s_j)² · Σ (s_j ‖W_j‖)², by Cauchy and Schwarz. Rows are
    taken relative to their own root mean square, because each will have a scale of its own: the huge numbers that
    models have at the first token of a sequence would drown everything else.
    """
    layers = _layers(model)
    sizes = remembered(model, lambda: _inner_sizes(model, layers))
    for layer, size in zip(layers, sizes, strict=True):
        up = len(layer.gate_up.out_features[0])
        columns = layer.down.weight.data
        norms = torch.linalg.vector_norm(columns, dim=0, dtype=torch.float32)
        factors = (size.clamp(min=TINY) / norms.clamp(min=TINY)).sqrt()
        factors = (factors / factors.median()).clamp(SMALLEST, 1 / SMALLEST)
        columns.copy_(columns * factors)
        layer.gate_up.weight.data[up:] /= factors[:, None]
        if layer.gate_up.bias is not None:
            layer.gate_up.bias.data[up:] /= factors


def _inner_sizes(model: CausalLM, layers: Sequence[DecoderLayer]) -> Tensor:
    """How large the channels that ``down`` takes are in text of the model's own: [layers, inner] float32.

    Random tokens are not text, and factors from them help less. To write token by token takes long; so the model reads
    random tokens, all are replaced at once by what it draws for their places, and it reads those.
    """
    config = model.config
    attention = ReferenceAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=LENGTH,
        dtype=model.embedding.dtype,
    )
    width = kv_width(LENGTH, config.head_dim, model.embedding.dtype)
    numbers = model.embedding.new_zeros((config.num_layers, SEQUENCES, config.num_kv_heads, width))
    kv_caches = LayerKVs(attention.kv_layout(numbers.dtype), numbers, LENGTH)
    every = torch.arange(SEQUENCES * LENGTH)
    metadata = attention.prepare(
        BatchLayout(
            query_start=torch.arange(SEQUENCES + 1, dtype=torch.int32) * LENGTH,
            seq_lens=torch.full((SEQUENCES,), LENGTH, dtype=torch.int32),
            block_tables=torch.arange(SEQUENCES, dtype=torch.int32)[:, None],
            slot_mapping=every,
            max_query_len=LENGTH,
            max_seq_len=LENGTH,
        )
    )
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, config.vocab_size, (SEQUENCES, LENGTH), generator=generator)
    for _ in range(PASSES):
        output = model(tokens.view(-1), every % LENGTH, kv_caches, attention, metadata, every)
        # A model that computes nonsense is found out by its first step, not here.
        chances = output.logits.nan_to_num().softmax(dim=-1)
        drawn = torch.multinomial(chances, 1, generator=generator)
        tokens[:, 1:] = drawn.view(SEQUENCES, LENGTH)[:, :-1]
    sizes: list[Tensor] = []

    def measure(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        rows = nn.functional.normalize(arguments[0].float(), dim=1)
        sizes.append(rows.pow(2).mean(dim=0).sqrt())

    hooks = [layer.down.register_forward_pre_hook(measure) for layer in layers]
    model(tokens.view(-1), every % LENGTH, kv_caches, attention, metadata, every[:0])
    for hook in hooks:
        hook.remove()
    return torch.stack(sizes)


def _layers(model: CausalLM) -> list[DecoderLayer]:
    return [cast("DecoderLayer", layer) for layer in model.layers]
