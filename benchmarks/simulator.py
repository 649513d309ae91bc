"""The simulator against measurements: fits its coefficients, prints its errors, and times it.

python benchmarks/simulator.py fit      # writes chairlift/simulate/data/coefficients.json from the measurements
python benchmarks/simulator.py errors   # the tables of docs/simulate.md
python benchmarks/simulator.py speed --trace AzureLLMInferenceTrace_conv.csv
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from chairlift.simulate import validation
from chairlift.simulate.cost import EngineCoefficients, ProductCoefficients

COEFFICIENTS = Path(__file__).parent.parent / "chairlift" / "simulate" / "data" / "coefficients.json"
SMALLEST = 1e-12  # coefficients are positive; what a fit drives below this is written as 0


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> np.ndarray:
    """Levenberg and Marquardt, over the logarithms, so that every coefficient stays positive."""
    x = np.log(np.asarray(start, float))
    current = residuals(np.exp(x))
    damping = 1e-2
    for _ in range(300):
        jacobian = np.stack([(residuals(np.exp(x + 1e-6 * e)) - current) / 1e-6 for e in np.eye(len(x))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        before = current @ current
        for _ in range(20):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            moved = np.maximum(x + np.clip(step, -2, 2), np.log(SMALLEST))
            tried = residuals(np.exp(moved))
            if tried @ tried < before:
                x, current, damping = moved, tried, damping / 3
                break
            damping *= 4
        if before - current @ current < 1e-10 * before:
            break
    return np.exp(x)


def fit_products(device: str) -> ProductCoefficients:
    points = validation.operator_points(device)
    measured = np.array([point.seconds for point in points])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array(validation.predict_operators(points, _products(x))) / measured - 1

    return _products(least_squares(residuals, [0.7, 0.8, 5e-6, 1.5]))


def _products(x: Sequence[float]) -> ProductCoefficients:
    compute, memory, launch, sharpness = (float(value) for value in x)
    return ProductCoefficients(compute=compute, memory=memory, launch=launch, sharpness=sharpness)


ENGINE_START = EngineCoefficients(
    step=5e-3,
    layer=1e-4,
    sequence=1e-5,
    parallel=3e-3,
    parallel_doubling=1e-3,
    products=1.0,
    pointwise=3.0,
    kv_read=0.7,
    attention=0.3,
    collective=2e-5,
    link=0.3,
    link_growth=0.5,
    sharpness=1.5,
)


def fit_engine(points: Sequence[validation.StepPoint], products: ProductCoefficients) -> EngineCoefficients:
    measured = np.array([point.seconds for point in points])
    names = [field.name for field in fields(EngineCoefficients)]

    def residuals(x: np.ndarray) -> np.ndarray:
        engine = EngineCoefficients(**dict(zip(names, map(float, x), strict=True)))
        return np.array(validation.predict_steps(points, products, engine)) / measured - 1

    found = least_squares(residuals, [getattr(ENGINE_START, name) for name in names])
    return EngineCoefficients(**{n: float(x) if x > 1e-9 else 0.0 for n, x in zip(names, found, strict=True)})


def rounded(coefficients: ProductCoefficients | EngineCoefficients) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(coefficients).items()}


def fit() -> None:
    products = {device: fit_products(device) for device in validation.OPERATOR_HARDWARE}
    engines = {
        engine: fit_engine(validation.step_points(engine), products["a100"]) for engine in ("distserve", "vllm-0.2.3")
    }
    content = {
        "products": {name: rounded(value) for name, value in products.items()},
        "engines": {name: rounded(value) for name, value in engines.items()},
    }
    COEFFICIENTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(COEFFICIENTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    fit()
