"""What a model weighs on one device, and how much KV cache that leaves."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.config import ConfigError
from chairlift.execution.memory import activation_bytes, shared_budget
from chairlift.model.config import ModelConfig
from chairlift.simulate.catalogue import Hardware

COLLECTIVE_BYTES = 256 * 1024**2  # buffers of the collectives of several devices


class SizingError(ConfigError):
    """A deployment that cannot be. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one weight in the layers' matrices, and whether the products run at the fp8 rate.

    Embedding, output head and norms stay at two bytes where the layers have fewer. Four-bit weights carry a scale and
    a zero point for every 128 of them.
    """

    name: str
    weight_bytes: float
    fp8_products: bool = False


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("bfloat16", 2.0),
        Precision("float16", 2.0),
        Precision("float32", 4.0),
        Precision("fp8", 1.0, fp8_products=True),
        Precision("int8", 1.0),
        Precision("int4", (4 + 32 / 128) / 8),
    )
}
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "int8": 1}
KV_SCALE_BYTES = {"int8": 4}
"""What ``serve --kv-cache-dtype`` keeps for each token and head beside its keys, and beside its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One replica: a model on ``tensor_parallel_size`` devices.

    Attributes:
        model: its shape.
        hardware: of each device.
        tensor_parallel_size: devices.
        precision: of the weights.
        kv_itemsize: bytes of one number in the KV cache.
        kv_scale_bytes: of the scale of a token's keys in one head, and of its values.
        gpu_memory_utilization: share of each device's memory to use.
        max_model_len: longest sequence.
        max_num_seqs, max_num_batched_tokens: limits of one step, which bound its activations.
        block_size: tokens in a KV block.
        swap_space: GiB of host memory for swapped blocks, on each device.
    """

    model: ModelConfig
    hardware: Hardware
    tensor_parallel_size: int = 1
    precision: Precision = PRECISIONS["bfloat16"]
    kv_itemsize: int = 2
    kv_scale_bytes: int = 0
    gpu_memory_utilization: float = 0.90
    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    swap_space: float = 0.0

    def __post_init__(self) -> None:
        tp, heads = self.tensor_parallel_size, self.model.num_heads
        if tp < 1 or heads % tp:
            fitting = [str(size) for size in range(1, 17) if heads % size == 0]
            raise SizingError(
                f"--tensor-parallel-size {tp} does not divide the model's {heads} query heads evenly; "
                f"use {', '.join(fitting)}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SizingError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization:g}")
        if self.max_model_len < 2:
            raise SizingError(f"--max-model-len must be at least 2, got {self.max_model_len}")
        if self.max_model_len > self.model.max_position_embeddings:
            raise SizingError(
                f"--max-model-len {self.max_model_len} is longer than the {self.model.max_position_embeddings} "
                "positions that the model was made for"
            )
        for flag, limit in (("--max-num-seqs", self.max_num_seqs), ("--block-size", self.block_size)):
            if limit < 1:
                raise SizingError(f"{flag} must be at least 1, got {limit}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SizingError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs})"
            )
        if self.swap_space < 0:
            raise SizingError(f"--swap-space must be at least 0 GiB, got {self.swap_space:g}")
        if self.precision.fp8_products and not self.hardware.fp8:
            raise SizingError(f"{self.hardware.title} has no fp8 arithmetic; use --dtype int8 for weights of one byte")

    @property
    def kv_heads(self) -> int:
        """Key/value heads on each device; with more devices than heads, each holds a copy of one."""
        return max(1, self.model.num_kv_heads // self.tensor_parallel_size)

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers, on each device."""
        model, tp = self.model, self.tensor_parallel_size
        query = model.num_heads * model.head_dim // tp
        key_value = self.kv_heads * model.head_dim
        attention = model.hidden_size * 2 * (query + key_value)
        biases = (query + 2 * key_value) * model.qkv_bias + model.hidden_size * model.o_bias
        mlp = 3 * model.hidden_size * model.intermediate_size // tp
        return model.num_layers * (attention + biases + mlp)

    @property
    def other_weights(self) -> int:
        """Numbers in embedding, output head and norms, on each device."""
        model = self.model
        embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
        norms = (2 * model.num_layers + 1) * model.hidden_size + 2 * model.num_layers * model.head_dim * model.qk_norm
        return embeddings // self.tensor_parallel_size + norms

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        other = max(2.0, self.precision.weight_bytes)
        return int(self.layer_weights * self.precision.weight_bytes + self.other_weights * other)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers, on each device."""
        return (
            self.model.num_layers * 2 * self.kv_heads * (self.model.head_dim * self.kv_itemsize + self.kv_scale_bytes)
        )

    @property
    def activation_bytes(self) -> int:
        """What the largest step needs besides, on each device: the engine's own estimate from above."""
        return activation_bytes(
            self.model,
            num_tokens=self.max_num_batched_tokens,
            num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
            max_model_len=self.max_model_len,
            itemsize=2,
        )

    @property
    def context_bytes(self) -> int:
        """What the driver and its libraries take on each device."""
        return self.hardware.context_bytes + (COLLECTIVE_BYTES if self.tensor_parallel_size > 1 else 0)

    @property
    def usable_bytes(self) -> int:
        """The share of each device's memory that may be used."""
        return int(self.hardware.memory_bytes * self.gpu_memory_utilization)

    @property
    def kv_budget(self) -> int:
        """Bytes of KV cache on each device; negative where the rest takes more than there is."""
        return shared_budget(
            total=self.hardware.memory_bytes,
            share=self.gpu_memory_utilization,
            in_use=self.weight_bytes + self.context_bytes,
            reserve=self.activation_bytes,
            device=self.hardware.title,
        ).num_bytes

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit; 0 where there is no room."""
        return max(0, self.kv_budget) // (self.kv_bytes_per_token * self.block_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self.num_blocks * self.block_size

    @property
    def num_host_blocks(self) -> int:
        """KV blocks in the swap space."""
        return int(self.swap_space * 1024**3) // (self.kv_bytes_per_token * self.block_size)

    @property
    def weights_fit(self) -> bool:
        """Whether weights, libraries and activations leave any room at all."""
        return self.weight_bytes + self.context_bytes + self.activation_bytes < self.usable_bytes
