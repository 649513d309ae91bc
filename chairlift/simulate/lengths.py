"""How long prompts and answers are: a mean, a distribution, or a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chairlift.measure.traces import fit_lengths, read_trace
from chairlift.simulate.sizes import SizingError

SAMPLES = 20_000
HELP = (
    "N (all equal), exponential:MEAN, lognormal:MEAN:CV (coefficient of variation), uniform:LOW:HIGH, "
    "or exponential:MEAN:CAP and lognormal:MEAN:CV:CAP to cut the tail off"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths of many requests.

    Attributes:
        pairs: (prompt tokens, output tokens), each at least 1.
        description: where they come from.
    """

    pairs: Sequence[tuple[int, int]]
    description: str

    @property
    def mean_prompt(self) -> float:
        """Mean prompt tokens."""
        return sum(prompt for prompt, _ in self.pairs) / len(self.pairs)

    @property
    def mean_output(self) -> float:
        """Mean output tokens."""
        return sum(output for _, output in self.pairs) / len(self.pairs)

    @property
    def mean(self) -> float:
        """Mean tokens of a whole sequence."""
        return self.mean_prompt + self.mean_output

    def percentile(self, share: float) -> float:
        """The length of whole sequences that this percentage does not exceed."""
        return float(np.percentile([prompt + output for prompt, output in self.pairs], share))

    @property
    def longest(self) -> int:
        """The longest whole sequence."""
        return max(prompt + output for prompt, output in self.pairs)

    @property
    def mean_resident(self) -> float:
        """Mean tokens in the cache of a sequence that is being decoded, looked at at a random step.

        A sequence is there for as many steps as it has output tokens, and grows while it is: long answers are met more
        often than they arrive, but half grown. So the mean is E[o·p + o²/2] / E[o].
        """
        held = sum(output * prompt + output * output / 2 for prompt, output in self.pairs)
        return held / sum(output for _, output in self.pairs)

    @property
    def resident_deviation(self) -> float:
        """Standard deviation of the length whose mean is :attr:`mean_resident`."""
        square = sum(o * p * p + o * o * p + o**3 / 3 for p, o in self.pairs) / sum(o for _, o in self.pairs)
        return math.sqrt(max(0.0, square - self.mean_resident**2))

    def clip(self, max_model_len: int) -> Lengths:
        """The same, with prompts and then outputs cut to what the model can hold."""
        if self.longest <= max_model_len:
            return self
        pairs = [
            (min(prompt, max_model_len - 1), max(1, min(output, max_model_len - min(prompt, max_model_len - 1))))
            for prompt, output in self.pairs
        ]
        cut = sum(before != after for before, after in zip(self.pairs, pairs, strict=True))
        return Lengths(pairs, f"{self.description}; {cut} of {len(pairs)} cut to {max_model_len} tokens")


def draw_lengths(prompt: str, output: str, count: int, seed: int = 0) -> Lengths:
    """Draws lengths from two distributions, independently.

    Args:
        prompt, output: as :data:`HELP` says.
        count: how many.
        seed: of the draws.

    Raises:
        SizingError: a distribution is written wrongly or cannot be.
    """
    rng = np.random.default_rng(seed)
    pairs = list(zip(_draw(prompt, rng, count), _draw(output, rng, count), strict=True))
    return Lengths(pairs, f"prompts {prompt}, outputs {output} tokens")


def trace_lengths(path: Path) -> Lengths:
    """The lengths of a recorded trace, prompt and output of each request together.

    Raises:
        WorkloadError: the trace cannot be read.
    """
    requests = read_trace(path)
    pairs, _ = fit_lengths(requests, 2**62)
    return Lengths(pairs, f"{len(pairs)} requests of {path.name}")


def _draw(text: str, rng: np.random.Generator, count: int) -> list[int]:
    kind, *arguments = text.split(":")
    if not arguments:
        kind, arguments = "fixed", [kind]
    try:
        values = [float(argument) for argument in arguments]
        low, high = _PARAMETERS[kind]
        if not low <= len(values) <= high or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError
        drawn = _DRAWS[kind](rng, count, values)
    except (KeyError, ValueError):
        raise SizingError(f"{text!r} is no length: write {HELP}") from None
    cap = values[low] if len(values) > low else math.inf
    return [int(max(1, min(cap, round(float(value))))) for value in drawn]


def _lognormal(rng: np.random.Generator, count: int, values: list[float]) -> np.ndarray:
    mean, variation = values[:2]
    sigma = math.sqrt(math.log1p(variation**2))
    return rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def _uniform(rng: np.random.Generator, count: int, values: list[float]) -> np.ndarray:
    low, high = values
    if low > high:
        raise ValueError
    return rng.integers(int(low), int(high) + 1, count)


# Least and most parameters; one more than the least is a cap.
_PARAMETERS = {"fixed": (1, 1), "exponential": (1, 2), "lognormal": (2, 3), "uniform": (2, 2)}
_DRAWS: dict[str, Callable[[np.random.Generator, int, list[float]], np.ndarray]] = {
    "fixed": lambda _, count, values: np.full(count, values[0]),
    "exponential": lambda rng, count, values: rng.exponential(values[0], count),
    "lognormal": _lognormal,
    "uniform": _uniform,
}
