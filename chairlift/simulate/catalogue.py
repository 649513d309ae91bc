"""Named model shapes and hardware, so that a deployment can be sized before either is at hand.

Model shapes are those of each model's published ``config.json``. Peaks are the makers' data sheets (dense, without
sparsity); memory is what the driver reports to programs, a little below the nominal size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.config import ConfigError
from chairlift.execution.memory import available_host_memory
from chairlift.model.config import ModelConfig, from_hf, read_config
from chairlift.model.source import HUB_ID, ModelError, resolve

GIB = 1024**3
CUDA_CONTEXT_BYTES = GIB // 2  # context, and workspaces of the libraries


class CatalogueError(ConfigError):
    """A name that is not in the catalogue. The message lists those that are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator.

    Attributes:
        name: as given to ``--hardware``.
        title: for people.
        memory_bytes: of the device, as the driver reports it.
        peak_flops: of dense bf16 matrix products a second.
        memory_bandwidth: bytes a second.
        fp8: whether the tensor cores compute in fp8, at twice the bf16 peak.
        link_bandwidth: bytes a second in one direction between two devices of a node.
        host_bandwidth: bytes a second to and from host memory, for swapping.
        fitted_as: the measured device whose efficiencies are used; see ``data/coefficients.json``.
        context_bytes: what the driver and its libraries take on each device.
    """

    name: str
    title: str
    memory_bytes: int
    peak_flops: float
    memory_bandwidth: float
    fp8: bool
    link_bandwidth: float
    host_bandwidth: float
    fitted_as: str
    context_bytes: int = CUDA_CONTEXT_BYTES


def _gpu(
    name: str, title: str, gib: float, tflops: float, gbps: float, link: float, host: float, fitted_as: str, fp8: bool
) -> Hardware:
    return Hardware(
        name=name,
        title=title,
        memory_bytes=int(gib * GIB),
        peak_flops=tflops * 1e12,
        memory_bandwidth=gbps * 1e9,
        fp8=fp8,
        link_bandwidth=link * 1e9,
        host_bandwidth=host * 1e9,
        fitted_as=fitted_as,
    )


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100-40g", "NVIDIA A100 40 GB (SXM)", 39.4, 312, 1555, 300, 25, "a100", fp8=False),
        _gpu("a100-80g", "NVIDIA A100 80 GB (SXM)", 79.15, 312, 2039, 300, 25, "a100", fp8=False),
        _gpu("h100", "NVIDIA H100 80 GB (SXM)", 79.1, 989, 3350, 450, 50, "h100", fp8=True),
        _gpu("h200", "NVIDIA H200 141 GB (SXM)", 139.8, 989, 4800, 450, 50, "h100", fp8=True),
        _gpu("l4", "NVIDIA L4 24 GB (PCIe)", 22.0, 121, 300, 25, 12, "a40", fp8=True),
        _gpu("l40s", "NVIDIA L40S 48 GB (PCIe)", 44.3, 362, 864, 25, 25, "a40", fp8=True),
    )
}


def _shape(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    architecture: str = "LlamaForCausalLM",
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _qwen2(*sizes: int, head_dim: int = 128, tied: bool = False) -> ModelConfig:
    hidden, intermediate, layers, heads, kv_heads, vocab = sizes
    return _shape(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        vocab,
        32768,
        head_dim=head_dim,
        tied=tied,
        architecture="Qwen2ForCausalLM",
    )


def _qwen3(*sizes: int, tied: bool = False) -> ModelConfig:
    hidden, intermediate, layers, heads, kv_heads = sizes
    return _shape(
        hidden, intermediate, layers, heads, kv_heads, 151936, 40960, tied=tied, architecture="Qwen3ForCausalLM"
    )


_CODELLAMA_13B = _shape(5120, 13824, 40, 40, 40, 32016, 16384)

MODELS: dict[str, ModelConfig] = {
    "codellama-7b": _shape(4096, 11008, 32, 32, 32, 32016, 16384),
    "codellama-13b": _CODELLAMA_13B,
    "codellama-34b": _shape(8192, 22016, 48, 64, 8, 32000, 16384),
    "llama-2-7b": _shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": replace(_CODELLAMA_13B, vocab_size=32000, max_position_embeddings=4096),
    "llama-2-70b": _shape(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _shape(4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _shape(8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256, 131072),
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tied=True),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128256, 131072, tied=True),
    "mistral-7b": _shape(4096, 14336, 32, 32, 8, 32768, 32768, architecture="MistralForCausalLM"),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, head_dim=64, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49152, 8192, head_dim=64, tied=True),
    "smollm2-360m": _shape(960, 2560, 32, 15, 5, 49152, 8192, head_dim=64, tied=True),
    "smollm2-1.7b": _shape(2048, 8192, 24, 32, 32, 49152, 8192, head_dim=64, tied=True),
}

THIS_MACHINE = "this"
BUILTIN_SHAPES = {"smollm2": "smollm2-135m"}


def find_hardware(name: str) -> Hardware:
    """The accelerator of that name, or "this" machine's CPU; case does not matter.

    Raises:
        CatalogueError: there is none.
    """
    if name.lower() == THIS_MACHINE:
        return this_machine()
    if name.lower() not in HARDWARE:
        raise CatalogueError(
            f"there is no hardware {name!r} in the catalogue; choose from {', '.join((*HARDWARE, THIS_MACHINE))}"
        )
    return HARDWARE[name.lower()]


def this_machine() -> Hardware:
    """The CPU of this machine with the memory that is available now. Its speed is measured, not looked up."""
    return Hardware(
        name=THIS_MACHINE,
        title="this machine's CPU",
        memory_bytes=available_host_memory(),
        peak_flops=0.0,
        memory_bandwidth=0.0,
        fp8=False,
        link_bandwidth=0.0,
        host_bandwidth=0.0,
        fitted_as="",
        context_bytes=0,
    )


def find_model(name: str, revision: str | None = None) -> ModelConfig:
    """The shape of that name: a catalogue name, a directory with a ``config.json``, a ``.gguf`` file, or a hub id.

    The catalogue comes first, and of a hub model only its configuration is fetched: no weights are needed to size it.

    Raises:
        CatalogueError: it is in no such place, or cannot be fetched.
        ModelError: it is there, but cannot be read or run.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if name in BUILTIN_SHAPES:
        return MODELS[BUILTIN_SHAPES[name]]
    path = Path(name).expanduser()
    if path.is_dir():
        return from_hf(_read_json(path / "config.json"))
    if path.is_file():
        return read_config(resolve(name))
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return from_hf(_read_json(_hub_config(name, revision)))
    raise CatalogueError(
        f"there is no model {name!r}: it is not a file or a directory here, nor a hub id of the form org/name, nor in "
        f"the catalogue ({', '.join(MODELS)})"
    )


def _hub_config(name: str, revision: str | None) -> Path:
    import huggingface_hub  # slow to import, and only hub ids need it

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision))
    # The client raises its HTTP library's errors too, and that library has changed between its versions.
    except Exception as error:
        raise CatalogueError(
            f"the configuration of {name!r} could not be fetched from the hub: {str(error).strip()}\n"
            f"Check the name and the network, pass a directory with its config.json, or name a shape of the catalogue: "
            f"{', '.join(MODELS)}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
