"""A cost model without a roofline: coefficients of what a step computes, fitted to steps that were measured.

The time of a step is taken as a sum: a fixed part, a slope over token rows that may change at a few knots (one row is a
matrix-vector product, hundreds are bound by arithmetic), and a coefficient each for sequences, sampled rows, cached
tokens read, and pairs of a prefill. All are at least 0: more work never takes less time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.config import ConfigError
from chairlift.model.source import cache_directory
from chairlift.scheduling.work import StepWork

FORMAT = "chairlift.cost/1"
REWEIGHTINGS = 4
KNOTS = (0, 1, 4, 16, 64, 256)
TERMS = ("step", *(f"rows_from_{knot}" for knot in KNOTS), "sequences", "sampled", "context", "pairs")


class CalibrationError(ConfigError):
    """A cost model that is missing, cannot be read or cannot be fitted. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """A fitted cost model, with what it was fitted on.

    Attributes:
        coefficients: seconds for each of :data:`TERMS`.
        model, dtype, device: what was measured.
        capacity: of the engine that was measured: num_blocks, block_size, max_num_batched_tokens, max_model_len.
        steps: how many steps were measured.
        mean_error: mean absolute relative error over them.
        source: how they were measured.
    """

    coefficients: dict[str, float]
    model: str
    dtype: str
    device: str
    capacity: dict[str, int]
    steps: int
    mean_error: float
    source: str

    def seconds(self, work: StepWork) -> float:
        """The time of one step."""
        of = self.coefficients
        total = of["step"] + of["sequences"] * work.sequences + of["sampled"] * work.sampled
        total += of["context"] * work.context + of["pairs"] * work.pairs
        for knot, amount in zip(KNOTS, _segments(work.rows), strict=True):
            total += of[f"rows_from_{knot}"] * amount
        return total

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


def load_cost(path: Path) -> MeasuredCost:
    """Reads what :meth:`MeasuredCost.save` wrote.

    Raises:
        CalibrationError: there is no such file, or it holds something else.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("it has another format")
        cost = MeasuredCost(**content)
        if set(cost.coefficients) != set(TERMS):
            raise ValueError("its terms are not those of this version")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(
            f"no cost model can be read from {path} ({error}); make one with: chairlift simulate MODEL --calibrate"
        ) from error
    return cost


def calibration_path(model: str) -> Path:
    """Where the calibration of this machine for a model is kept."""
    return cache_directory() / "calibration" / f"{model.strip('/').replace('/', '--')}.json"


def fit_cost(
    steps: Sequence[tuple[StepWork, float]],
    *,
    model: str,
    dtype: str,
    device: str,
    capacity: dict[str, int],
    source: str,
) -> MeasuredCost:
    """Fits the coefficients by least squares of the relative errors, each coefficient at least 0.

    Raises:
        CalibrationError: there are too few steps.
    """
    if len(steps) < len(TERMS):
        raise CalibrationError(f"{len(steps)} steps are too few to fit {len(TERMS)} coefficients to")
    seconds = np.array([time for _, time in steps])
    features = np.array([_features(work) for work, _ in steps], float)
    # Weighted by the measured times, noise would pull the fit below the mean, as slow steps would count for less than
    # fast ones. So that is only the beginning, and the weights that follow are the fit's own.
    expected = seconds
    for _ in range(REWEIGHTINGS):
        found = _weighted_fit(features, seconds, 1 / expected)
        expected = features @ found
    errors = expected / seconds - 1
    return MeasuredCost(
        coefficients=dict(zip(TERMS, (float(value) for value in found), strict=True)),
        model=model,
        dtype=dtype,
        device=device,
        capacity=capacity,
        steps=len(steps),
        mean_error=float(np.abs(errors).mean()),
        source=source,
    )


def _weighted_fit(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    weighted = features * weights[:, None]
    # Columns of a common scale, or the solver would stop early on the smallest ones.
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-30)
    found: np.ndarray = non_negative_least_squares(weighted / scale, seconds * weights) / scale
    return found


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimizes |a x − b| over x ≥ 0, by the active-set method of Lawson and Hanson (1974, chapter 23)."""
    columns = a.shape[1]
    x = np.zeros(columns)
    active = np.zeros(columns, bool)
    tolerance = 1e-10 * np.abs(a.T @ b).max()
    for _ in range(3 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[active] = -np.inf
        if active.all() or gradient.max() <= tolerance:
            break
        active[int(gradient.argmax())] = True
        while True:
            solution = np.zeros(columns)
            solution[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            blocked = active & (solution <= 0)
            if not blocked.any():
                x = solution
                break
            step = (x[blocked] / (x[blocked] - solution[blocked])).min()
            x = np.maximum(x + step * (solution - x), 0)
            active &= x > 1e-15
    return x


def _segments(rows: int) -> list[int]:
    """How many of the rows lie between each knot and the next."""
    ends = (*KNOTS[1:], rows)
    return [max(0, min(rows, end) - knot) for knot, end in zip(KNOTS, ends, strict=True)]


def _features(work: StepWork) -> list[float]:
    return [1.0, *_segments(work.rows), work.sequences, work.sampled, work.context, work.pairs]
