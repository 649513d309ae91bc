"""Static and continuous batching on one simulated deployment, as a comparison that ``compare``'s reports can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chairlift.measure.compare import Comparison, Policy, PolicyResult, to_json
from chairlift.measure.metrics import Metrics, step_metrics
from chairlift.measure.records import Run
from chairlift.measure.workload import Workload
from chairlift.simulate.fleet import Outcome
from chairlift.simulate.search import Setting, cost_per_million, outcome_metrics
from chairlift.simulate.setup import capacity

SCHEMA = "chairlift.simulate/1"
# Above this many requests, what every step computed for every sequence is not kept.
MOST_DETAILED = 2000


def simulate_policies(
    setting: Setting,
    workload: Workload,
    static_batch_sizes: Sequence[int] = (),
    *,
    slos: Mapping[str, float] | None = None,
    price: float | None = None,
    detail: bool = False,
    seed: int = 0,
    name: str = "",
) -> Comparison:
    """Simulates the workload under continuous batching and under static batches of each size.

    Args:
        setting: the deployment and its fleet.
        workload: the requests.
        static_batch_sizes: of the baselines; may be empty.
        slos: objectives in milliseconds.
        price: of one device for an hour, to give a price for a million tokens.
        detail: keep what pictures need.
        seed: of the workload, for the report.
        name: of the model.
    """
    timeout = setting.static_batch_timeout
    policies = [
        *(Policy("static", size, timeout) for size in dict.fromkeys(static_batch_sizes)),
        Policy("continuous", setting.deployment.max_num_seqs),
    ]
    results = []
    for policy in policies:
        chosen = replace(setting, static_batch_size=policy.size if policy.kind == "static" else None)
        outcome = chosen.run(workload, detail=detail)
        metrics = _metrics(outcome, setting, slos, price)
        run = outcome.first_run() if detail else Run(outcome.requests, (), outcome.duration)
        results.append(PolicyResult(policy, [run], [metrics]))
    return Comparison(workload, capacity(setting.deployment, setting.cost, name), seed, slos or {}, results)


def _metrics(outcome: Outcome, setting: Setting, slos: Mapping[str, float] | None, price: float | None) -> Metrics:
    metrics = outcome_metrics(outcome, slos)
    if outcome.details[0]:
        # Over the first replica: how much memory is reserved and used does not add up over replicas.
        memory = step_metrics(outcome.details[0], outcome.duration)
        metrics |= {key: memory[key] for key in memory if key.startswith("kv_") or key == "max_running"}
    if price is not None:
        metrics |= cost_per_million(metrics, price, setting.replicas * setting.deployment.tensor_parallel_size)
    return metrics


def simulation_json(comparison: Comparison, setting: Setting, *, detailed: bool = False) -> dict[str, Any]:
    """The document of ``compare``, with what was simulated instead of the machine that it ran on."""
    document = to_json(comparison, detailed=detailed)
    del document["machine"]
    deployment = setting.deployment
    return document | {
        "schema": SCHEMA,
        "simulated": {
            "hardware": deployment.hardware.name,
            "tensor_parallel_size": deployment.tensor_parallel_size,
            "dtype": deployment.precision.name,
            "gpu_memory_utilization": deployment.gpu_memory_utilization,
            "max_num_seqs": deployment.max_num_seqs,
            "max_num_batched_tokens": deployment.max_num_batched_tokens,
            "swap_space": deployment.swap_space,
            "replicas": setting.replicas,
            "routing": setting.routing,
            "prefix_caching": setting.prefix_caching,
        },
    }
