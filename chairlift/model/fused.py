"""The decoder of :mod:`chairlift.model.llama` on the CPU, with packed weights and a whole step in one kernel.

It computes the same as the plain model, which stays its reference; where the plain one rounds the residual stream, the
queries and what lies between norm and activation to bfloat16, this one keeps float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.model.attention.base import AttentionBackend, LayerKVs
from chairlift.model.attention.cpu import LOG2_E, CpuAttention, CpuMetadata, WorkPlan, bits_of
from chairlift.model.base import ModelOutput
from chairlift.model.config import ModelConfig
from chairlift.model.kernels import kinds, tiles
from chairlift.model.kernels.by_kind import Packed
from chairlift.model.kernels.decoder import (
    STAGES,
    STAGES_PER_LAYER,
    Buffers,
    Sizes,
    Step,
    Weights,
    run_step,
)
from chairlift.model.kernels.head import Head
from chairlift.model.kernels.memory import WORD_BYTES, aligned, for_threads
from chairlift.model.kernels.pieces import AHEAD
from chairlift.model.kernels.products import BLOCK_COLUMNS, BLOCK_ROWS, Words, pack, uses_tiles
from chairlift.model.kernels.products import unsupported as unsupported_precision
from chairlift.model.kernels.simd import LANES
from chairlift.model.kernels.threads import COUNTER
from chairlift.model.layers import Linear
from chairlift.model.llama import CausalLM, DecoderLayer
from chairlift.model.smoothing import smooth

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[Any]

MIN_POSITIONS = 1024
"""How far the first table of rotations goes. Each later one goes at least twice as far as the one before, and is some
hundredths of the keys and values of so long a sequence."""


class FusedCausalLM:
    """A decoder whose weights are packed for the CPU. Called like :class:`~chairlift.model.llama.CausalLM`.

    Args:
        model: with its weights loaded, in float32 or bfloat16; its projections are emptied as they are packed. For int8
            all of its weights change before (:mod:`chairlift.model.smoothing`).
        attention: the backend whose work plans the kernel follows.
        quantization: "int8" for int8 products, ``None`` for products in the model's own precision.

    Attributes:
        times: [threads, stages of a step] int64, ticks of the processor's clock since the model was made.

    Raises:
        ValueError: :func:`unsupported` says why.
    """

    def __init__(self, model: CausalLM, attention: CpuAttention, quantization: str | None = None) -> None:
        dtype = model.embedding.dtype
        if reason := unsupported(model.config, dtype, quantization, model.ranks.size):
            raise ValueError(reason)
        if quantization == "int8":
            smooth(model)
        self.config = config = model.config
        self.embedding = model.embedding
        self.rotary = model.rotary
        self._kind = _kind(dtype, quantization)
        self._attention = attention
        self._sizes = Sizes(
            attention=attention.kind,
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=_filled((config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
            block_shift=attention.block_shift,
            tile=attention.tile_rows,
            threads=attention.threads.count,
        )
        # The head comes first: a tied one is the embedding, which stays. (Smoothing for int8 has untied it.)
        tied = model.head.weight is model.embedding
        self._packed_head = Packed(*_pack([model.head], is_quantized(self._kind), keep=tied), 0, 0)
        self._weights = self._pack(model)
        self._config = tiles.full_tiles()
        self._num_counters = (2 + STAGES_PER_LAYER * config.num_layers) * COUNTER
        self.times = np.zeros((attention.threads.count, len(STAGES)), np.int64)
        self._room = 0
        self._make_room(BLOCK_ROWS)
        self._logits = self._peaks = np.empty(0, np.float32)
        self._tokens = self._best = np.empty(0, np.int64)
        self._no_logits = torch.empty(0, config.vocab_size)
        self._cos = self._sin = np.empty(0, np.float32)
        self._cache: LayerKVs | None = None  # that of the last step, and its pages
        self._pages: Numbers
        self._no_pages: Numbers | None = None  # of the same types
        windows = sorted({window or 0 for window in config.sliding_windows})
        self._windows = windows
        self._layer_windows = np.array([window or 0 for window in config.sliding_windows], np.int64)
        self._layer_plans = np.array([windows.index(window) for window in self._layer_windows], np.int64)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return int(sum(array.nbytes for array in (*self._weights, *self._packed_head[:3])))

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: LayerKVs,
        attention: AttentionBackend[Any],
        metadata: CpuMetadata,
        sampled: Tensor,
        wants_logits: bool = True,
    ) -> ModelOutput:
        """Computes one step of a ragged batch; see :meth:`CausalLM.forward`. The residual stream is float32."""
        del attention  # the kernel's own
        rows = len(token_ids)
        self._make_room(rows)
        plans = [self._attention.plan(metadata, window) for window in self._windows]
        step = self._step(token_ids, positions, metadata, plans)
        head = self._head_of(sampled.numpy(), kept=wants_logits)
        self._run(self._sizes, self._buffers, head, step, self._pages_of(kv_caches))
        return ModelOutput(self._stream[:rows], self._scores(head), head.best.tolist())

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [S, hidden_size] to [S, vocab_size] float32, valid until the next call."""
        if self._no_pages is None:
            raise RuntimeError("there has been no step yet whose rows these could be")
        rows = len(hidden)
        self._make_room(rows)
        head = self._head_of(np.arange(rows), kept=True)
        buffers = self._buffers._replace(x=hidden.contiguous().view(-1).numpy())
        self._run(self._sizes._replace(num_layers=0), buffers, head, self._no_step(), self._no_pages)
        return self._scores(head)

    def _run(self, sizes: Sizes, buffers: Buffers, head: Head, step: Step, cache: Numbers) -> None:
        # New ones for each step: after an interrupt a thread may still be in the last.
        counters = aligned(self._num_counters, np.int64, zeros=True)
        self._attention.threads.run(
            run_step, self._kind, sizes, np.float32(self.config.rms_norm_eps),
            np.float32(self._attention.scale * LOG2_E), self._weights, head, buffers,
            self._attention.scratch(cache.dtype), step, cache, counters, self.times, self._config,
        )  # fmt: skip

    def _head_of(self, rows: npt.NDArray[np.int64], *, kept: bool) -> Head:
        vocab_size, threads = self.config.vocab_size, self._sizes.threads
        # A few numbers more than a power of two apart, or the rows would share the cache's places among them.
        stride = _filled(vocab_size) + BLOCK_COLUMNS
        if kept and len(rows) * stride > len(self._logits):
            # Pages that are given back and taken anew at every step would cost as much as the product.
            self._logits = aligned(_whole_blocks(len(rows)) * stride, np.float32)
        if len(rows) > len(self._best):
            self._best = np.empty(_whole_blocks(len(rows)), np.int64)
            self._peaks, self._tokens = (for_threads(threads, len(self._best), t) for t in (np.float32, np.int64))
        best = self._best[: len(rows)]
        return Head(self._packed_head, rows, self._logits, vocab_size, stride, kept, self._peaks, self._tokens, best)

    def _scores(self, head: Head) -> Tensor:
        if not head.kept:
            return self._no_logits
        scores: Tensor = torch.from_numpy(self._logits).view(-1, head.stride)[: len(head.rows), : head.vocab_size]
        return scores

    def _step(self, token_ids: Tensor, positions: Tensor, metadata: CpuMetadata, plans: Sequence[WorkPlan]) -> Step:
        cos, sin = self.rotations(int(metadata.seq_lens.max()))
        partials = max(plan.num_partials for plan in plans)
        return Step(
            token_ids=token_ids.numpy(),
            positions=positions.numpy(),
            cos=cos,
            sin=sin,
            slots=metadata.slots,
            tables=metadata.block_tables,
            items=np.concatenate([plan.items for plan in plans]) if len(plans) > 1 else plans[0].items,
            item_bounds=np.array([0, *accumulate(len(plan.items) for plan in plans)]),
            merges=np.concatenate([plan.merges for plan in plans]) if len(plans) > 1 else plans[0].merges,
            merge_bounds=np.array([0, *accumulate(len(plan.merges) for plan in plans)]),
            plans=self._layer_plans,
            windows=self._layer_windows,
            partial=np.empty((partials, self._sizes.tile, self._sizes.head_dim + 2), np.float32),
        )

    def rotations(self, num_positions: int) -> tuple[Floats, Floats]:
        """Cosines and sines of at least so many positions, [positions × head_dim / 2] float32; kept for later steps."""
        known = len(self._cos) // (self.config.head_dim // 2)
        if num_positions > known:
            cos, sin = self.rotary(torch.arange(max(num_positions, 2 * known, MIN_POSITIONS)))
            self._cos, self._sin = cos.contiguous().view(-1).numpy(), sin.contiguous().view(-1).numpy()
        return self._cos, self._sin

    def _no_step(self) -> Step:
        """A step of no rows, of the same types as any other, since code is compiled for types."""
        ints, floats = np.empty(0, np.int64), np.empty(0, np.float32)
        tables, items, merges = (np.empty((0, columns), np.int32) for columns in (0, 8, 5))
        partial = np.empty((0, 0, 0), np.float32)
        return Step(ints, ints, floats, floats, ints, tables, items, ints, merges, ints, ints, ints, partial)

    def _pages_of(self, kv_caches: LayerKVs) -> Numbers:
        """The same as at the last step, nearly always: each call of torch takes as long as ten of Python's own."""
        if kv_caches is not self._cache:
            self._pages = self._attention.pages(kv_caches)
            self._no_pages = self._pages[:0]
            self._cache = kv_caches
        return self._pages

    def _make_room(self, rows: int) -> None:
        if rows > self._room:
            self._room = _whole_blocks(rows)
            self._buffers = self._make_buffers(self._room)
            self._stream: Tensor = torch.from_numpy(self._buffers.x).view(-1, self.config.hidden_size)

    def _make_buffers(self, rows: int) -> Buffers:
        sizes = self._sizes
        taken: type[np.generic] = np.uint8 if is_quantized(self._kind) else bits_of(self.embedding).dtype.type
        made = np.float32 if is_quantized(self._kind) else taken
        attended = sizes.num_heads * sizes.head_dim
        widest = max(sizes.hidden, attended, sizes.inner)
        return Buffers(
            x=aligned(rows * sizes.hidden, np.float32, zeros=True),
            qkv=aligned(rows * sizes.qkv, np.float32, zeros=True),
            attended=aligned(rows * attended, made, zeros=True),
            inner=aligned(rows * sizes.inner, made, zeros=True),
            activations=aligned(rows * widest, taken, zeros=True),
            scales=aligned(rows, np.float32, zeros=True),
            row=for_threads(sizes.threads, sizes.hidden, np.float32),
            numbers=for_threads(sizes.threads, BLOCK_ROWS * BLOCK_COLUMNS, np.float32),
            ahead=for_threads(sizes.threads, AHEAD, np.int64),
        )

    def _pack(self, model: CausalLM) -> Weights:
        layers = [cast("DecoderLayer", layer) for layer in model.layers]
        attentions = [layer.attention for layer in layers]
        for layer in layers:
            layer.gate_up.weight.data = _interleaved(layer.gate_up.weight.data)
        projections = [
            p for layer in layers for p in (layer.attention.qkv, layer.attention.o, layer.gate_up, layer.down)
        ]
        return Weights(
            _flat(model.embedding.data),
            *_pack(projections, is_quantized(self._kind)),
            qkv_bias=_biases([attention.qkv.bias for attention in attentions], self._sizes.qkv),
            attention_norm=_floats([layer.attention_norm.weight for layer in layers]),
            mlp_norm=_floats([layer.mlp_norm.weight for layer in layers]),
            final_norm=_floats([model.norm.weight]),
            q_norm=_floats([attention.q_norm.weight for attention in attentions if attention.q_norm is not None]),
            k_norm=_floats([attention.k_norm.weight for attention in attentions if attention.k_norm is not None]),
        )


def unsupported(config: ModelConfig, dtype: torch.dtype, quantization: str | None, num_ranks: int = 1) -> str | None:
    """Why a model cannot be run this way, or ``None`` if it can."""
    if num_ranks > 1:
        return "fused steps run all layers at once, and ranks have to meet between them"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"fused steps compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    precision = quantization or ("float32" if dtype == torch.float32 else "bfloat16")
    if reason := unsupported_precision(precision):
        return reason
    if config.o_bias or config.mlp_bias:
        return "fused steps have no biases behind attention and in the MLP"
    words = LANES if uses_tiles(precision) else 1
    step = max(BLOCK_COLUMNS, words * {"float32": 1, "bfloat16": 2, "int8": 4}[precision])
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    if any(width % step for width in widths):
        return f"fused steps in {precision} need widths that are multiples of {step}, not {widths}"
    return None


def is_quantized(kind: kinds.Kind) -> bool:
    """Whether products are int8."""
    return isinstance(kind, kinds.Int8 | kinds.Int8Tiles)


def _kind(dtype: torch.dtype, quantization: str | None) -> kinds.Kind:
    if quantization == "int8":
        return kinds.Int8Tiles() if uses_tiles("int8") else kinds.Int8()
    if dtype == torch.float32:
        return kinds.Float32()
    return kinds.BFloat16Tiles() if uses_tiles("bfloat16") else kinds.BFloat16()


def _filled(columns: int) -> int:
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def _interleaved(weight: Tensor) -> Tensor:
    """Gate over up [2 × inner, hidden], with sixteen rows of one beside the same sixteen of the other."""
    halves = weight.view(2, -1, LANES, weight.shape[1])
    return halves.transpose(0, 1).reshape(weight.shape)


def _pack(projections: Sequence[Linear], quantized: bool, *, keep: bool = False) -> tuple[Words, Floats, Words]:
    """Packs projections end to end: their words, and for int8 each column's scale and offset.

    Each is emptied once it is packed, unless told to ``keep`` them, so that memory never holds much more than all once.
    """
    columns = [_filled(len(projection.weight)) for projection in projections]
    itemsize = 1 if quantized else projections[0].weight.dtype.itemsize
    widths = [projection.weight.shape[1] for projection in projections]
    words = aligned(sum(n * k for n, k in zip(columns, widths, strict=True)) * itemsize // WORD_BYTES, np.int32)
    scales = np.zeros(sum(columns) if quantized else 0, np.float32)
    offsets = np.zeros(sum(columns) if quantized else 0, np.int32)
    word = column = 0
    for projection, filled in zip(projections, columns, strict=True):
        weight = projection.weight.data
        if quantized:
            numbers, scale = _quantize(weight)
            scales[column : column + len(scale)] = scale
            # Activations are stored as unsigned numbers, 128 too large.
            offsets[column : column + len(scale)] = 128 * numbers.sum(axis=1, dtype=np.int32)
        else:
            numbers = bits_of(weight)
        packed = pack(numbers)
        words[word : word + len(packed)] = packed
        word, column = word + len(packed), column + filled
        if not keep:
            projection.weight.data = weight.new_empty(0)
    return words, scales, offsets


def _quantize(weight: Tensor) -> tuple[npt.NDArray[np.int8], Floats]:
    """int8 numbers and one scale for each output channel."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp_(min=1e-30) / 127
    return (wide / scale[:, None]).round_().to(torch.int8).numpy(), scale.numpy()


def _flat(tensor: Tensor) -> npt.NDArray[Any]:
    return bits_of(tensor).reshape(-1)


def _floats(tensors: Sequence[Tensor]) -> Floats:
    if not tensors:
        return np.empty(0, np.float32)
    return torch.stack([tensor.data for tensor in tensors]).float().view(-1).numpy()


def _biases(biases: Sequence[Tensor | None], columns: int) -> Floats:
    given = [bias.data.float() for bias in biases if bias is not None]
    if not given:
        return np.empty(0, np.float32)
    return torch.stack([torch.nn.functional.pad(bias, (0, columns - len(bias))) for bias in given]).view(-1).numpy()
