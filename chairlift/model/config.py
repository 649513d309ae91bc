"""The shape of a model, read from a ``config.json`` or from GGUF metadata. Free of torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf.quants import dequantize

from chairlift.model.gguf_file import GGUFFile, end_token_ids, open_gguf
from chairlift.model.source import ModelError, ModelSource

# The architectures that can be run, each with the values that ``transformers`` takes where its config.json is silent.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Rope types, each with the parameters that it cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family, by configuration.

    Attributes:
        architecture: class name in ``transformers``, such as ``LlamaForCausalLM``.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: decoder layers.
        num_heads, num_kv_heads: query heads, and the key/value heads that they share (GQA).
        head_dim: width of one head; not always ``hidden_size / num_heads``.
        rms_norm_eps: epsilon of RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling parameters under the names of ``transformers`` (``rope_type`` among them), complete, or
            ``None``. One type is not of ``transformers``: "freq_factors", from GGUF, divides each frequency by its
            entry in the list ``freq_factors``.
        max_position_embeddings: longest sequence that the model was made for, scaling included.
        tie_word_embeddings: whether the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: RMSNorm over each head of queries and keys before the rotation (Qwen3).
        sliding_windows: per layer, how many positions back a token sees, itself included; ``None`` for all.
            Given empty, every layer sees all.
        bos_token_id: beginning-of-sequence token, if the model has one.
        eos_token_ids: any of these ends a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"the rotation pairs the numbers of a head, so head_dim must be even, not {self.head_dim}")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise ModelError(f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers")


def read_config(source: ModelSource) -> ModelConfig:
    """Reads the shape of a model from its files.

    Raises:
        ModelError: a file is missing or damaged, or the model is of a kind that cannot be run.
    """
    if source.format == "gguf":
        return from_gguf(open_gguf(source.path))
    generation = source.path / "generation_config.json"
    return from_hf(_read_json(source.path / "config.json"), _read_json(generation) if generation.is_file() else {})


def from_hf(config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    """Reads the shape from a ``config.json``, of ``transformers`` 4 or 5.

    A sequence ends at the eos tokens of either file.

    Raises:
        ModelError: a value is missing, contradicts another, or asks for what cannot be run.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config)
    config = {**ARCHITECTURES[architecture], **config}
    num_heads, hidden_size = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    head_dim = _count(config, "head_dim") if config.get("head_dim") is not None else hidden_size // num_heads
    max_position = _count(config, "max_position_embeddings")
    theta, scaling = _rope_from_hf(config, max_position, head_dim)
    bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(config.get("attention_bias"))
    eos = [*_ids(config.get("eos_token_id")), *_ids((generation_config or {}).get("eos_token_id"))]
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads") if config.get("num_key_value_heads") else num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_scaled_length(max_position, scaling),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        o_bias=bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(architecture, config),
        bos_token_id=next(iter(_ids(config.get("bos_token_id"))), None),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def from_gguf(file: GGUFFile) -> ModelConfig:
    """Reads the shape from GGUF metadata; biases, norms and a tied head show in which tensors there are.

    Raises:
        ModelError: a value is missing, or asks for what cannot be run.
    """
    name = file.metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise ModelError(f"the GGUF architecture {name!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    prefix = f"{name}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if values.get("expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    num_heads, hidden_size = _count(values, "attention.head_count"), _count(values, "embedding_length")
    head_dim = _count(values, "attention.key_length") if "attention.key_length" in values else hidden_size // num_heads
    if values.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported")
    max_position = _count(values, "context_length")
    scaling = _rope_from_gguf(file, values, max_position)
    num_layers = _count(values, "block_count")
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[name],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_count(values, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(values, "attention.head_count_kv") if "attention.head_count_kv" in values else num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", DEFAULT_RMS_NORM_EPS)),
        rope_theta=float(values.get("rope.freq_base", DEFAULT_ROPE_THETA)),
        rope_scaling=scaling,
        max_position_embeddings=_scaled_length(max_position, scaling),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(values.get("attention.sliding_window") or None,) * num_layers,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(file.metadata),
    )


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures") or []
    if not named and (kind := config.get("model_type")):
        named = [f"{str(kind).capitalize()}ForCausalLM"]
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    raise ModelError(
        f"the architecture {', '.join(map(str, named)) or '(none is named in config.json)'} is not supported; "
        f"supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"the checkpoint is quantized with {method!r}, which is not supported; take the model's unquantized "
            "checkpoint, or a quantized .gguf file of it"
        )
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"the activation {activation!r} is not supported; supported: silu")


def _sliding_windows(architecture: str, config: dict[str, Any]) -> tuple[int | None, ...]:
    """Mistral's window holds for every layer; Qwen's for the layers that ``layer_types`` or a first layer names."""
    num_layers = _count(config, "num_hidden_layers")
    window = config.get("sliding_window")
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    if architecture == "LlamaForCausalLM" or window is None or (qwen and not config.get("use_sliding_window")):
        return (None,) * num_layers
    window = _count(config, "sliding_window")
    if not qwen:
        return (window,) * num_layers
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= config["max_window_layers"] else "full_attention" for layer in range(num_layers)
    ]
    if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"layers of the type {', '.join(unknown)} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope_from_hf(config: dict[str, Any], max_position: int, head_dim: int) -> tuple[float, dict[str, Any] | None]:
    """Returns the base and the complete scaling parameters.

    ``transformers`` 5 writes both as ``rope_parameters``; 4 wrote ``rope_theta`` and ``rope_scaling``, whose type went
    by the name of ``type`` at first.
    """
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError("rope_parameters that differ between layers are not supported")
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA)
    if (rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("a rotation of only a part of each head (partial_rotary_factor) is not supported")
    legacy = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or legacy or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"the rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return theta, None
    if kind == "dynamic":
        rope["original_max_position_embeddings"] = max_position
    elif "original_max_position_embeddings" in ROPE_TYPES[kind]:
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or max_position
        if rope.get("factor") is None and kind in ("yarn", "longrope"):
            rope["factor"] = max_position / rope["original_max_position_embeddings"]
    _check_rope(kind, rope, head_dim)
    return theta, {"rope_type": kind, **rope}


def _check_rope(kind: str, rope: dict[str, Any], head_dim: int) -> None:
    for key in ROPE_TYPES[kind]:
        value = rope.get(key)
        if key in ("short_factor", "long_factor"):
            if not isinstance(value, list) or len(value) != head_dim // 2:
                raise ModelError(f"rope scaling {kind!r} needs {key!r}, a list of {head_dim // 2} numbers")
        elif not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"rope scaling {kind!r} needs {key!r}, a number above 0; config.json has {value!r}")


def _rope_from_gguf(file: GGUFFile, values: dict[str, Any], max_position: int) -> dict[str, Any] | None:
    if (freqs := file.tensors.get("rope_freqs.weight")) is not None:
        factors = dequantize(freqs.data, freqs.quantization).reshape(freqs.shape)
        return {"rope_type": "freq_factors", "freq_factors": factors.tolist()}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"the GGUF rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    rope: dict[str, Any] = {"rope_type": kind, "factor": values.get("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = values.get("rope.scaling.original_context_length", max_position)
        for key in ("beta_fast", "beta_slow"):
            if (value := values.get(f"rope.scaling.yarn_{key}")) is not None:
                rope[key] = value
    _check_rope(kind, rope, 0)
    if kind == "yarn" and (attention := values.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = attention * yarn_attention_factor(rope["factor"])
    return rope


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of queries and keys against the flattening of attention in longer contexts (arXiv:2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaled_length(max_position: int, rope: dict[str, Any] | None) -> int:
    """The longest sequence once scaling stretches it; llama3 and longrope state theirs scaled already."""
    if rope is None or rope["rope_type"] not in ("linear", "dynamic", "yarn"):
        return max_position
    return max(max_position, int(rope.get("original_max_position_embeddings", max_position) * rope["factor"]))


def _count(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the model's configuration has {key} = {value!r}; a whole number above 0 is needed")
    return value


def _ids(value: Any) -> list[int]:
    """A token id, a list of them, or nothing."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"the model's configuration has {value!r} where a token id, or a list of them, is needed")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
