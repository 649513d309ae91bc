"""How long a step takes: a roofline for matrix products, attention and collectives, and what the engine adds.

A step of ``n`` token rows takes

    engine(n) + layers × [products(n) + pointwise(n) + attention(context) + 2 × all-reduce(n)] + head(sampled)

Each product is bound by arithmetic or by memory, with a smooth passage between the two (Williams et al., Roofline,
2009); reading keys and values is bound by memory; the engine adds a fixed time for each step, layer and sequence. The
coefficients are fitted to measurements, see ``data/README.md`` and ``docs/simulate.md``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Protocol

from chairlift.scheduling.work import StepWork
from chairlift.simulate.catalogue import CatalogueError, Hardware
from chairlift.simulate.sizes import Deployment

ACTIVATION_ITEMSIZE = 2
# Numbers that norms, rotation, residuals and the activation read and write for a row, in widths of the residual
# stream and of the MLP.
POINTWISE_HIDDEN, POINTWISE_MLP = 14, 4
LINKED_AT_ONCE = 4  # devices at which a ring uses all links of each


class StepCost(Protocol):
    """Tells how long a step takes."""

    def seconds(self, work: StepWork) -> float:
        """Returns the time of one step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCoefficients:
    """Matrix products on one device.

    Attributes:
        compute: share of the peak reached where arithmetic binds.
        memory: share of the bandwidth reached where memory binds.
        launch: seconds that any product takes.
        sharpness: exponent p of (compute^p + memory^p)^(1/p); the higher, the harder the edge of the roofline.
    """

    compute: float
    memory: float
    launch: float
    sharpness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoefficients:
    """What an engine makes of a device.

    Attributes:
        step, layer, sequence: seconds added for each.
        parallel, parallel_doubling: seconds that a step takes longer on two devices, and again for each doubling.
        products: factor on the time of matrix products.
        pointwise: factor on the time that moving a row's activations once would take.
        kv_read: share of the bandwidth reached in reading keys and values.
        attention: share of the peak reached over the pairs of a prefill.
        collective: seconds that any all-reduce takes.
        link: share of the link's bandwidth that an all-reduce of two devices reaches.
        link_growth: exponent with which that share grows with the devices, as more links are in use at once.
        sharpness: of the products' rooflines in this engine's steps, instead of the operators' own.
    """

    step: float
    layer: float
    sequence: float
    parallel: float
    parallel_doubling: float
    products: float
    pointwise: float
    kv_read: float
    attention: float
    collective: float
    link: float
    link_growth: float
    sharpness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one device computes of a model.

    Attributes:
        layers: how many.
        hidden: width of the residual stream.
        mlp: width of the MLP on this device.
        products: (inner, outer) sizes of a layer's matrices on this device.
        head: sizes of the output head.
        query: width of all query heads on this device.
        kv_bytes: bytes of one token's keys and values in one layer on this device.
        devices: that share the model.
        weight_itemsize: bytes of one weight.
        compute: factor on the arithmetic peak; 2 for fp8.
        kv_block_bytes: bytes of one block over all layers, for swapping.
    """

    layers: int
    hidden: int
    mlp: int
    products: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    query: int
    kv_bytes: int
    devices: int = 1
    weight_itemsize: float = 2.0
    compute: float = 1.0
    kv_block_bytes: int = 0


def layer_shape(deployment: Deployment) -> LayerShape:
    """What one device of a deployment computes."""
    model, tp = deployment.model, deployment.tensor_parallel_size
    query = model.num_heads * model.head_dim // tp
    key_value = deployment.kv_heads * model.head_dim
    mlp = model.intermediate_size // tp
    return LayerShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        mlp=mlp,
        products=(
            (model.hidden_size, query + 2 * key_value),
            (query, model.hidden_size),
            (model.hidden_size, 2 * mlp),
            (mlp, model.hidden_size),
        ),
        head=(model.hidden_size, model.vocab_size // tp),
        query=query,
        kv_bytes=deployment.kv_bytes_per_token // model.num_layers,
        devices=tp,
        weight_itemsize=deployment.precision.weight_bytes,
        compute=2.0 if deployment.precision.fp8_products else 1.0,
        kv_block_bytes=deployment.kv_bytes_per_token * deployment.block_size,
    )


class RooflineCost:
    """The cost model of a shape on one kind of hardware under one engine."""

    def __init__(
        self, shape: LayerShape, hardware: Hardware, products: ProductCoefficients, engine: EngineCoefficients
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.products = products
        self.engine = engine
        self._of_rows = lru_cache(maxsize=65536)(self._row_seconds)
        self._of_sampled = lru_cache(maxsize=65536)(self._head_seconds)
        layers, devices = shape.layers, shape.devices
        self._fixed = engine.step + layers * engine.layer
        if devices > 1:
            self._fixed += engine.parallel + engine.parallel_doubling * math.log2(devices)
        self._per_context = layers * shape.kv_bytes / (hardware.memory_bandwidth * engine.kv_read)
        self._per_pair = layers * 4 * shape.query / (hardware.peak_flops * engine.attention)
        self._per_swapped = shape.kv_block_bytes / hardware.host_bandwidth

    def seconds(self, work: StepWork) -> float:
        """The time of one step; see the module."""
        return (
            self._fixed
            + self.engine.sequence * work.sequences
            + self._of_rows(work.rows)
            + self._of_sampled(work.sampled)
            + self._per_context * work.context
            + self._per_pair * work.pairs
            + self._per_swapped * work.swapped_blocks
        )

    def product_seconds(self, inner: int, outer: int, rows: int, itemsize: float) -> float:
        """One product of a (rows × inner) with an (inner × outer) matrix of weights of ``itemsize`` bytes."""
        coefficients, hardware = self.products, self.hardware
        arithmetic = 2 * rows * inner * outer / (hardware.peak_flops * self.shape.compute * coefficients.compute)
        moved = inner * outer * itemsize + rows * (inner + outer) * ACTIVATION_ITEMSIZE
        memory = moved / (hardware.memory_bandwidth * coefficients.memory)
        p = coefficients.sharpness
        return coefficients.launch + float((arithmetic**p + memory**p) ** (1 / p))

    def layer_products(self, rows: int) -> float:
        """All products of one layer, before the engine's factor."""
        shape = self.shape
        return sum(self.product_seconds(k, n, rows, shape.weight_itemsize) for k, n in shape.products)

    def layer_pointwise(self, rows: int) -> float:
        """Moving one layer's activations once, before the engine's factor."""
        moved = rows * (POINTWISE_HIDDEN * self.shape.hidden + POINTWISE_MLP * self.shape.mlp) * ACTIVATION_ITEMSIZE
        return moved / self.hardware.memory_bandwidth

    def _row_seconds(self, rows: int) -> float:
        engine = self.engine
        layer = engine.products * self.layer_products(rows) + engine.pointwise * self.layer_pointwise(rows)
        return self.shape.layers * (layer + 2 * self._all_reduce(rows))

    def _head_seconds(self, sampled: int) -> float:
        inner, outer = self.shape.head
        return self.engine.products * self.product_seconds(inner, outer, sampled, 2.0) if sampled else 0.0

    def _all_reduce(self, rows: int) -> float:
        """A ring: each device sends 2 (d − 1)/d of the data (Patarasuk and Yuan, 2009)."""
        devices = self.shape.devices
        if devices == 1:
            return 0.0
        sent = 2 * (devices - 1) / devices * rows * self.shape.hidden * ACTIVATION_ITEMSIZE
        share = self.engine.link * math.pow(min(devices, LINKED_AT_ONCE) / 2, self.engine.link_growth)
        return self.engine.collective + sent / (self.hardware.link_bandwidth * share)


@cache
def coefficients() -> dict[str, Any]:
    """The fitted coefficients, as ``data/coefficients.json`` has them."""
    text = resources.files("chairlift.simulate").joinpath("data", "coefficients.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def product_coefficients(device: str) -> ProductCoefficients:
    """Of a measured device: a100, h100 or a40."""
    return ProductCoefficients(**coefficients()["products"][device])


def engine_names() -> list[str]:
    """The engines that coefficients are there for; the first is the default."""
    return list(coefficients()["engines"])


def engine_coefficients(name: str) -> EngineCoefficients:
    """Of an engine, fitted on A100-80G.

    Raises:
        CatalogueError: there are none for it.
    """
    engines = coefficients()["engines"]
    if name not in engines:
        raise CatalogueError(f"there are no coefficients for the engine {name!r}; choose from {', '.join(engines)}")
    return EngineCoefficients(**engines[name])


def roofline(deployment: Deployment, engine: str) -> RooflineCost:
    """The cost model of a deployment under the named engine."""
    hardware = deployment.hardware
    found = engine_coefficients(engine)
    products = replace(product_coefficients(hardware.fitted_as), sharpness=found.sharpness)
    return RooflineCost(layer_shape(deployment), hardware, products, found)
