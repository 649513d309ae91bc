"""The built-in workloads of ``chairlift compare``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import numpy as np

from chairlift.measure.arrivals import gamma_arrivals
from chairlift.measure.traces import fit
from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest, make_requests, random_prompt

WORKED_EXAMPLE = {"A": 200, "B": 50, "C": 30, "D": 10, "E": 40, "F": 40}
WORKED_EXAMPLE_SLOTS = 4
WORKED_EXAMPLE_PROMPT = 16  # equal, so that the example shows what ended rows cost, and nothing else
REQUESTS_PER_CLIENT = 4  # enough that the end, when clients have nothing left to send, counts little


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """What a scenario can be told.

    Attributes:
        max_length: longest sequence, prompt and output together.
        vocab_size: prompts are drawn from [0, vocab_size).
        seed: of all draws.
        num_requests: instead of the scenario's own number.
        request_rate, burstiness: of the open loop of ``bursty``; see :func:`gamma_arrivals`.
    """

    max_length: int
    vocab_size: int
    seed: int = 0
    num_requests: int | None = None
    request_rate: float = 4.0
    burstiness: float = 1 / 16


def build_scenario(name: str, options: ScenarioOptions) -> Workload:
    """Makes the named workload; the same name and options always make the same one.

    Raises:
        WorkloadError: there is no such scenario, or its sequences are longer than ``max_length``.
    """
    if name not in SCENARIOS:
        raise WorkloadError(f"there is no scenario {name!r}; choose from {', '.join(SCENARIOS)}")
    workload = SCENARIOS[name](options, np.random.default_rng(options.seed))
    longest = max(request.num_tokens for request in workload.requests)
    if longest > options.max_length:
        raise WorkloadError(
            f"scenario {name} has sequences of {longest} tokens, and the model's length is {options.max_length}"
        )
    return workload


class LengthShape:
    """Prompt and output lengths of a real service, as quantiles; see ``data/README.md``."""

    def __init__(self, file: str) -> None:
        table = json.loads(resources.files("chairlift.measure").joinpath("data", file).read_text("utf-8"))
        self.longest_sequence: int = table["longest_sequence"]
        self._probability: list[float] = table["probability"]
        self._prompt: list[int] = table["prompt_tokens"]
        self._output: list[int] = table["output_tokens"]

    def draw(self, rng: np.random.Generator, count: int, max_length: int) -> list[tuple[int, int]]:
        """Draws lengths, scaled to ``max_length`` by the rule of :func:`fit_lengths`.

        Each length stands for an equal share of the service's requests, so that even a few requests have its mean and
        its spread, and workloads of different size can be compared. The seed decides which prompt goes with which
        output, and their order: in the service, the two do not depend on one another.
        """
        if max_length < 2:
            raise WorkloadError(f"a sequence has at least 2 tokens, and the model's length is {max_length}")
        factor = min(1.0, max_length / self.longest_sequence)
        prompts = np.interp(_shares(rng, count), self._probability, self._prompt)
        outputs = np.interp(_shares(rng, count), self._probability, self._output)
        return [fit(round(p), round(o), factor, max_length) for p, o in zip(prompts, outputs, strict=True)]


def _shares(rng: np.random.Generator, count: int) -> np.ndarray:
    """The middles of ``count`` equal parts of [0, 1], in random order."""
    shares: np.ndarray = (rng.permutation(count) + 0.5) / count
    return shares


def _worked_example(options: ScenarioOptions, rng: np.random.Generator) -> Workload:
    requests = tuple(
        WorkloadRequest(name, random_prompt(rng, WORKED_EXAMPLE_PROMPT, options.vocab_size), output)
        for name, output in WORKED_EXAMPLE.items()
    )
    return Workload(
        "worked-example",
        "A, B, C and D generate 200, 50, 30 and 10 tokens in four places; E and F, 40 each, wait behind them.",
        requests,
    )


def _peak(clients: int) -> Callable[[ScenarioOptions, np.random.Generator], Workload]:
    def build(options: ScenarioOptions, rng: np.random.Generator) -> Workload:
        count = options.num_requests or REQUESTS_PER_CLIENT * clients
        lengths = LengthShape("code_completion.json").draw(rng, count, options.max_length)
        return Workload(
            f"peak-{clients}",
            f"{clients} clients of a code-completion service, each sending its next request when it has its answer; "
            f"lengths as in Azure's code trace of 2023, prompts scaled to {options.max_length} tokens.",
            make_requests(lengths, options.vocab_size, rng),
            clients,
        )

    return build


def _short(options: ScenarioOptions, rng: np.random.Generator) -> Workload:
    count = options.num_requests or 128
    lengths = [(int(p), int(o)) for p, o in zip(rng.integers(16, 65, count), rng.integers(4, 13, count), strict=True)]
    return Workload(
        "short",
        "Short answers only, of 4 to 12 tokens, to prompts of 16 to 64, all sent at once.",
        make_requests(lengths, options.vocab_size, rng),
    )


def _uniform(options: ScenarioOptions, rng: np.random.Generator) -> Workload:
    count = options.num_requests or 64
    return Workload(
        "uniform",
        "Every prompt and every answer has 64 tokens, all sent at once: nothing to pad, nobody ends before the rest.",
        make_requests([(64, 64)] * count, options.vocab_size, rng),
    )


def _bursty(options: ScenarioOptions, rng: np.random.Generator) -> Workload:
    count = options.num_requests or 100
    lengths = LengthShape("code_completion.json").draw(rng, count, options.max_length)
    arrivals = gamma_arrivals(rng, count, options.request_rate, options.burstiness)
    return Workload(
        "bursty",
        f"The lengths of peak-50 at {options.request_rate:g} requests a second in bursts: gaps with a coefficient of "
        f"variation of {options.burstiness**-0.5:.3g}.",
        make_requests(lengths, options.vocab_size, rng, arrivals),
    )


SCENARIOS: dict[str, Callable[[ScenarioOptions, np.random.Generator], Workload]] = {
    "worked-example": _worked_example,
    "peak-50": _peak(50),
    "peak-80": _peak(80),
    "short": _short,
    "uniform": _uniform,
    "bursty": _bursty,
}
