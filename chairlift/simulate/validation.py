"""The measurements that the cost model is fitted to and held against, and its errors on them.

Origin and licence of the data: ``data/README.md``. The step times are not raw measurements but DistServe's published
fits of them, evaluated here on the grid of batch sizes and lengths that was measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from chairlift.scheduling.work import StepWork
from chairlift.simulate.catalogue import HARDWARE, Hardware
from chairlift.simulate.cost import (
    EngineCoefficients,
    LayerShape,
    ProductCoefficients,
    RooflineCost,
    engine_coefficients,
    product_coefficients,
)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192)
PROMPT_LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 284, 512, 768, 1024, 1536, 2020)
OUTPUT_LENGTH = 16  # decode times are means over the steps of 16 tokens
# Tokens that the profiled batches could hold, by model and tensor-parallel size; none were measured beyond.
MEASURED = {
    ("facebook/opt-13b", 1): 49152,
    ("facebook/opt-13b", 2): 98304,
    ("facebook/opt-13b", 4): 250000,
    ("facebook/opt-66b", 2): 8192,
    ("facebook/opt-66b", 3): 36864,
    ("facebook/opt-66b", 4): 65000,
}
# Published like the others, and not fitted to. The range that was profiled is not published; this one is assumed.
HELD_OUT = {("facebook/opt-66b", 8): 65000}
OPT = {"facebook/opt-13b": (40, 5120, 20480), "facebook/opt-66b": (64, 9216, 36864)}  # layers, hidden, mlp
OPT_VOCAB = 50272
# hidden, mlp, query and key/value heads of the models whose operators were measured; heads are 128 wide.
OPERATOR_SHAPES = {
    "codellama/CodeLlama-34b-Instruct-hf": (8192, 22016, 64, 8),
    "internlm/internlm-20b": (5120, 13824, 40, 40),
    "meta-llama/Llama-2-70b-hf": (8192, 28672, 64, 8),
    "meta-llama/Llama-2-7b-hf": (4096, 11008, 32, 32),
    "meta-llama/Meta-Llama-3-70B": (8192, 28672, 64, 8),
    "meta-llama/Meta-Llama-3-8B": (4096, 14336, 32, 8),
}
PRODUCT_COLUMNS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
A40 = Hardware(
    name="a40",
    title="NVIDIA A40 48 GB",
    memory_bytes=44 * 1024**3,
    peak_flops=149.7e12,
    memory_bandwidth=696e9,
    fp8=False,
    link_bandwidth=25e9,
    host_bandwidth=25e9,
    fitted_as="a40",
)
OPERATOR_HARDWARE = {"a100": HARDWARE["a100-80g"], "h100": HARDWARE["h100"], "a40": A40}


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step whose time is known.

    Attributes:
        model, devices: what ran it.
        phase: "prefill" or "decode".
        work: what it computed.
        seconds: how long it took.
    """

    model: str
    devices: int
    phase: str
    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class OperatorPoint:
    """The matrix products of one layer, whose time is known."""

    device: str
    model: str
    devices: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors over many points."""

    count: int
    mean_absolute: float
    bias: float
    p95: float
    worst: float
    within_tenth: float


def summarize(predicted: Iterable[float], measured: Iterable[float]) -> Errors:
    """Relative errors of predictions: mean absolute, mean, 95th percentile, worst, and the share within 10 %."""
    errors = np.asarray(list(predicted)) / np.asarray(list(measured)) - 1
    absolute = np.abs(errors)
    return Errors(
        len(errors),
        float(absolute.mean()),
        float(errors.mean()),
        float(np.percentile(absolute, 95)),
        float(absolute.max()),
        float((absolute <= 0.1 + 1e-9).mean()),
    )


def opt_shape(model: str, devices: int) -> LayerShape:
    """OPT on some devices: an MLP of two matrices, heads as wide as the residual stream."""
    layers, hidden, mlp = OPT[model]
    width = hidden // devices
    return LayerShape(
        layers=layers,
        hidden=hidden,
        mlp=mlp // devices,
        products=((hidden, 3 * width), (width, hidden), (hidden, mlp // devices), (mlp // devices, hidden)),
        head=(hidden, OPT_VOCAB // devices),
        query=width,
        kv_bytes=2 * width * 2,
        devices=devices,
    )


def operator_shape(model: str, devices: int) -> LayerShape:
    """One layer of a model whose operators were measured."""
    hidden, mlp, heads, kv_heads = OPERATOR_SHAPES[model]
    query, key_value = heads * 128 // devices, kv_heads * 128 // devices
    return LayerShape(
        layers=1,
        hidden=hidden,
        mlp=mlp // devices,
        products=(
            (hidden, query + 2 * key_value),
            (query, hidden),
            (hidden, 2 * mlp // devices),
            (mlp // devices, hidden),
        ),
        head=(hidden, 1),
        query=query,
        kv_bytes=4 * key_value,
        devices=devices,
    )


def step_points(engine: str, ranges: Mapping[tuple[str, int], int] = MEASURED) -> list[StepPoint]:
    """The measured range of an engine: "vllm-0.2.3" or "distserve"."""
    fits = json.loads(_data("step_fits.json"))[engine]
    points = []
    for (model, devices), most_tokens in ranges.items():
        fit = fits[model][str(devices)]
        for batch in BATCH_SIZES:
            for length in PROMPT_LENGTHS:
                if batch * -(-length // 16) * 16 <= most_tokens:
                    points += _points(fit, model, devices, batch, length)
    return points


def _points(fit: dict[str, Any], model: str, devices: int, batch: int, length: int) -> list[StepPoint]:
    a, b, c = fit["prefill"]
    tokens, pairs = batch * length, batch * length * (length + 1) // 2
    prefill = StepWork(rows=tokens, sequences=batch, sampled=batch, pairs=pairs)
    seconds = (a + b * tokens + c * tokens * length) / 1000
    a, b, c = fit["decoding_smallbs" if batch < fit["decoding_large_small_bs_threshold"] else "decoding_largebs"]
    context = batch * (length + OUTPUT_LENGTH // 2)
    decode = StepWork(rows=batch, sequences=batch, sampled=batch, context=context)
    return [
        StepPoint(model, devices, "prefill", prefill, seconds),
        StepPoint(model, devices, "decode", decode, (a + b * context + c * batch) / 1000),
    ]


def operator_points(device: str) -> list[OperatorPoint]:
    """The products of one layer on a device: "a100", "h100" or "a40"."""
    return [
        OperatorPoint(
            device,
            row["model"],
            int(row["tp"]),
            int(row["num_tokens"]),
            sum(float(row[column]) for column in PRODUCT_COLUMNS) / 1000,
        )
        for row in csv.DictReader(_data("layer_operators.csv").splitlines())
        if row["device"] == device
    ]


def predict_steps(
    points: Sequence[StepPoint], products: ProductCoefficients, engine: EngineCoefficients
) -> list[float]:
    """Seconds of each step on A100-80G."""
    products = replace(products, sharpness=engine.sharpness)
    costs = {
        (point.model, point.devices): RooflineCost(
            opt_shape(point.model, point.devices), HARDWARE["a100-80g"], products, engine
        )
        for point in points
    }
    return [costs[point.model, point.devices].seconds(point.work) for point in points]


def predict_operators(points: Sequence[OperatorPoint], products: ProductCoefficients) -> list[float]:
    """Seconds of the products of each layer, without any engine."""
    engine = engine_coefficients("distserve")  # takes no part in the products alone
    return [
        RooflineCost(
            operator_shape(point.model, point.devices), OPERATOR_HARDWARE[point.device], products, engine
        ).layer_products(point.rows)
        for point in points
    ]


def step_errors(engine: str, ranges: Mapping[tuple[str, int], int] = MEASURED) -> dict[tuple[str, int, str], Errors]:
    """By model, tensor-parallel size and phase, and over all under ("all", 0, "")."""
    points = step_points(engine, ranges)
    predicted = predict_steps(points, product_coefficients("a100"), engine_coefficients(engine))
    groups: dict[tuple[str, int, str], list[int]] = {}
    for index, point in enumerate(points):
        groups.setdefault((point.model, point.devices, point.phase), []).append(index)
    groups["all", 0, ""] = list(range(len(points)))
    return {
        key: summarize((predicted[i] for i in chosen), (points[i].seconds for i in chosen))
        for key, chosen in groups.items()
    }


def operator_errors(device: str) -> dict[int, Errors]:
    """By tensor-parallel size, and over all under 0."""
    points = operator_points(device)
    predicted = predict_operators(points, product_coefficients(device))
    sizes = sorted({point.devices for point in points})
    return {
        size: summarize(
            (p for p, point in zip(predicted, points, strict=True) if size in (0, point.devices)),
            (point.seconds for point in points if size in (0, point.devices)),
        )
        for size in [0, *sizes]
    }


def _data(name: str) -> str:
    return resources.files("chairlift.simulate").joinpath("data", name).read_text("utf-8")
