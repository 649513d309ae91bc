"""From a model's files to a model that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch

from chairlift.config import ConfigError
from chairlift.model.attention.base import AttentionBackend
from chairlift.model.base import Decoder
from chairlift.model.config import ARCHITECTURES, ModelConfig
from chairlift.model.gguf_file import open_gguf
from chairlift.model.llama import CausalLM
from chairlift.model.loader.gguf import iterate_gguf
from chairlift.model.loader.safetensors import iterate_safetensors
from chairlift.model.loader.weights import load_weights
from chairlift.model.parallel import Communicator
from chairlift.model.source import ModelError, ModelSource

MODELS: dict[str, type[CausalLM]] = dict.fromkeys(ARCHITECTURES, CausalLM)


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Communicator | None = None,
) -> CausalLM:
    """Builds a model, or one rank's part of it, and fills it with the weights of ``source``.

    Weights go to the device tensor by tensor, so that host memory holds little more than one of them; a rank reads its
    own part of each.

    Args:
        source: where the files are.
        config: from :func:`chairlift.model.config.read_config`.
        dtype: of weights and activations.
        device: where the weights go.
        ranks: the others that share the model; ``None`` for a whole model. None of them is called here.

    Raises:
        ModelError: the architecture is not supported, or the weights do not fit the configuration.
    """
    if config.architecture not in MODELS:
        raise ModelError(f"the architecture {config.architecture} is not supported; supported: {', '.join(MODELS)}")
    model = MODELS[config.architecture](config, dtype=dtype, device=device, ranks=ranks)
    if source.format == "gguf":
        load_weights(model, iterate_gguf(open_gguf(source.path), config))
    else:
        load_weights(model, iterate_safetensors(source.path))
    return model.eval()


@contextmanager
def numba_starting(attention: AttentionBackend[Any]) -> Iterator[None]:
    """Has Numba get ready meanwhile, where kernels will need it: a third of a second, which the first of them took."""
    if attention.name != "cpu":
        yield
        return
    from numba import njit

    thread = Thread(target=njit(lambda: None), name="chairlift-numba", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def fit_to_cpu(model: CausalLM, attention: AttentionBackend[Any], quantization: str | None) -> Decoder:
    """Packs a model's weights for fused steps where its attention runs on the CPU and the processor can; else as it is.

    Raises:
        ConfigError: ``quantization`` is asked for and cannot be had for this model, here.
    """
    if attention.name == "cpu":
        # Numba takes a while to import, and nothing else needs it.
        from chairlift.model.attention.cpu import CpuAttention
        from chairlift.model.fused import FusedCausalLM, unsupported

        reason = unsupported(model.config, model.embedding.dtype, quantization, model.ranks.size)
        if reason is None and isinstance(attention, CpuAttention):
            return FusedCausalLM(model, attention, quantization)
    else:
        reason = f"it needs the attention backend cpu, not {attention.name}"
    if quantization:
        raise ConfigError(f"--quantization {quantization} cannot be had here: {reason}; leave it out")
    return model
