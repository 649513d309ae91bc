"""From a model's files to a model that runs."""

from __future__ import annotations

import torch

from chairlift.model.config import ARCHITECTURES, ModelConfig
from chairlift.model.gguf_file import open_gguf
from chairlift.model.llama import CausalLM
from chairlift.model.loader.gguf import iterate_gguf
from chairlift.model.loader.safetensors import iterate_safetensors
from chairlift.model.loader.weights import load_weights
from chairlift.model.source import ModelError, ModelSource

MODELS: dict[str, type[CausalLM]] = dict.fromkeys(ARCHITECTURES, CausalLM)


def load_model(source: ModelSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Builds a model and fills it with the weights of ``source``.

    Weights go to the device tensor by tensor, so that host memory holds little more than one of them.

    Args:
        source: where the files are.
        config: from :func:`chairlift.model.config.read_config`.
        dtype: of weights and activations.
        device: where the weights go.

    Raises:
        ModelError: the architecture is not supported, or the weights do not fit the configuration.
    """
    if config.architecture not in MODELS:
        raise ModelError(f"the architecture {config.architecture} is not supported; supported: {', '.join(MODELS)}")
    model = MODELS[config.architecture](config, dtype=dtype, device=device)
    if source.format == "gguf":
        load_weights(model, iterate_gguf(open_gguf(source.path), config))
    else:
        load_weights(model, iterate_safetensors(source.path))
    return model.eval()
