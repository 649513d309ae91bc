"""Floating-point operations that a model needs for its useful work."""

from __future__ import annotations

from chairlift.measure.metrics import UsefulWork
from chairlift.model.config import ModelConfig


def useful_work(model: ModelConfig, peak: float) -> UsefulWork:
    """Two operations for each weight of the layers and token row; the output head for each sampled token.

    Attention, norms and activations are left out: they are no matrix products over weights, and small beside them for
    the lengths of the scenarios.

    Args:
        model: its shape.
        peak: FLOPs a second that the device's matrix products reach.
    """
    query = model.num_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * query + 2 * key_value)
    mlp = 3 * model.hidden_size * model.intermediate_size
    return UsefulWork(2.0 * model.num_layers * (attention + mlp), 2.0 * model.vocab_size * model.hidden_size, peak)
