"""A code-generation service that moved from static to continuous batching, held against the figures reported of it.

CodeLlama-13B in tensor parallel on two A100-80G; about 50 concurrent requests, then 80; continuous batching with
``--max-num-seqs 32 --max-model-len 4096 --gpu-memory-utilization 0.90 --swap-space 16``. Nothing is reported of prompt
and output lengths, of the static batches, of how utilisation was measured, or of which tokens are counted.
``docs/case-study.md``
tells how the settings below were found, how plausible they are, and which of the figures cannot hold together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chairlift.measure.metrics import Metrics
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import roofline
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.search import Setting, outcome_metrics
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import synthetic_workload

CLIENTS, MORE_CLIENTS = 50, 80
REQUESTS_PER_CLIENT = 12
LIMIT_SECONDS = 30.0  # what static batching is said to exceed beyond 60 clients


@dataclass(frozen=True, slots=True)
class Reference:
    """A reported figure.

    Attributes:
        name: for people.
        key: of the metric that it is held against.
        policy: "static" or "continuous".
        clients: how many there were.
        value: reported; latencies in milliseconds.
        at_least: whether it is a lower bound.
    """

    name: str
    key: str
    policy: str
    clients: int
    value: float
    at_least: bool = False


REFERENCES = (
    Reference("utilisation", "effective_utilisation", "static", CLIENTS, 0.35),
    Reference("utilisation", "effective_utilisation", "continuous", CLIENTS, 0.78),
    Reference("mean latency", "mean_e2el_ms", "static", CLIENTS, 8200),
    Reference("mean latency", "mean_e2el_ms", "continuous", CLIENTS, 2400),
    Reference("P99 latency", "p99_e2el_ms", "static", CLIENTS, 21500),
    Reference("P99 latency", "p99_e2el_ms", "continuous", CLIENTS, 4800),
    Reference("tokens/s", "tokens", "static", CLIENTS, 1200),
    Reference("tokens/s", "tokens", "continuous", CLIENTS, 3850),
    Reference("P99 latency", "p99_e2el_ms", "static", MORE_CLIENTS, 1000 * LIMIT_SECONDS, at_least=True),
    Reference("P99 latency", "p99_e2el_ms", "continuous", MORE_CLIENTS, 4800),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSetting:
    """What is not reported, and has to be assumed.

    Attributes:
        title: for people.
        engine: whose step times.
        prompt, output: lengths, as ``--input-len`` writes them.
        static_batch_size: of the static batches.
        tokens: what tokens/s counts: "output_throughput" or "total_token_throughput".
    """

    title: str
    engine: str
    prompt: str
    output: str
    static_batch_size: int
    tokens: str


SETTINGS: tuple[CaseSetting, ...] = (
    CaseSetting(
        title="most figures hold",
        engine="distserve",
        prompt="lognormal:173:1.88:2900",
        output="lognormal:81:0.45:662",
        static_batch_size=22,
        tokens="total_token_throughput",
    ),
    CaseSetting(
        title="best with the step times of vLLM 0.2.3",
        engine="vllm-0.2.3",
        prompt="lognormal:194:1.31:2900",
        output="lognormal:52:0.10:512",
        static_batch_size=24,
        tokens="total_token_throughput",
    ),
    CaseSetting(
        title="best if only output tokens count",
        engine="distserve",
        prompt="lognormal:87:0.82:2900",
        output="lognormal:120:0.31:349",
        static_batch_size=16,
        tokens="output_throughput",
    ),
    CaseSetting(
        title="lengths of a real code-completion service (means of Azure's trace of 2023)",
        engine="distserve",
        prompt="lognormal:2100:0.9:3900",
        output="lognormal:28:1.5:190",
        static_batch_size=8,
        tokens="total_token_throughput",
    ),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One setting and the figures that come of it: metrics by policy and number of clients."""

    setting: CaseSetting
    metrics: dict[tuple[str, int], Metrics]

    def value(self, reference: Reference) -> float:
        """The simulated figure that stands beside a reported one."""
        key = self.setting.tokens if reference.key == "tokens" else reference.key
        return self.metrics[reference.policy, reference.clients][key]

    def ratio(self, reference: Reference) -> float:
        """Simulated over reported."""
        return self.value(reference) / reference.value

    def holds(self, reference: Reference, tolerance: float = 0.2) -> bool:
        """Whether a figure comes out within ``tolerance``, or beyond a lower bound."""
        ratio = self.ratio(reference)
        return ratio >= 1 if reference.at_least else abs(ratio - 1) <= tolerance


def run_setting(
    setting: CaseSetting,
    *,
    clients: Sequence[int] = (CLIENTS, MORE_CLIENTS),
    requests_per_client: int = REQUESTS_PER_CLIENT,
) -> CaseResult:
    """Simulates both policies at each number of clients."""
    deployment = case_deployment()
    cost = roofline(deployment, setting.engine)
    metrics: dict[tuple[str, int], Metrics] = {}
    for count in clients:
        lengths = draw_lengths(setting.prompt, setting.output, count * requests_per_client)
        workload = synthetic_workload(lengths, clients=count)
        for policy, size in (("static", setting.static_batch_size), ("continuous", None)):
            run = Setting(deployment=deployment, cost=cost, static_batch_size=size)
            metrics[policy, count] = outcome_metrics(run.run(workload))
    return CaseResult(setting, metrics)


def case_deployment() -> Deployment:
    """As it is reported."""
    return Deployment(
        model=MODELS["codellama-13b"],
        hardware=HARDWARE["a100-80g"],
        tensor_parallel_size=2,
        gpu_memory_utilization=0.90,
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        swap_space=16,
    )


@dataclass(frozen=True, slots=True)
class CaseStudy:
    """All settings with their figures."""

    results: Sequence[CaseResult]

    def report(self) -> str:
        """A table for each setting: reported, simulated, and whether the two agree within 20 %."""
        parts = []
        for result in self.results:
            setting = result.setting
            parts.append(
                f"{setting.title}: prompts {setting.prompt}, outputs {setting.output}, static batches of "
                f"{setting.static_batch_size}, step times of {setting.engine}, counting "
                f"{'all' if setting.tokens.startswith('total') else 'output'} tokens"
            )
            parts.append(f"  {'':<14}{'policy':<12}{'clients':>8}{'reported':>12}{'simulated':>12}  within 20 %")
            for reference in REFERENCES:
                bound = ">" if reference.at_least else ""
                parts.append(
                    f"  {reference.name:<14}{reference.policy:<12}{reference.clients:>8}"
                    f"{bound + _show(reference, reference.value):>12}{_show(reference, result.value(reference)):>12}  "
                    f"{'yes' if result.holds(reference) else 'NO'}"
                )
            parts.append("")
        parts.append("How these were found, and which figures cannot hold together: docs/case-study.md")
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The same for scripts, with all metrics."""
        return {
            "schema": "chairlift.case-study/1",
            "references": [asdict(reference) for reference in REFERENCES],
            "settings": [
                {
                    **asdict(result.setting),
                    "figures": [
                        {"value": result.value(reference), "holds": result.holds(reference)} for reference in REFERENCES
                    ],
                    "metrics": {
                        f"{policy}-{clients}": metrics for (policy, clients), metrics in result.metrics.items()
                    },
                }
                for result in self.results
            ],
        }


def run_case_study(
    settings: Sequence[CaseSetting] = SETTINGS, note: Callable[[str], None] = lambda _: None
) -> CaseStudy:
    """Simulates every setting."""
    results = []
    for setting in settings:
        note(f"simulating {setting.title}")
        results.append(run_setting(setting))
    return CaseStudy(results)


def _show(reference: Reference, value: float) -> str:
    if reference.key.endswith("_ms"):
        return f"{value / 1000:.1f} s"
    return f"{value:.0%}" if value <= 1 else f"{value:,.0f}"
