"""What routing is worth where prompts share beginnings: hit rate of the prefix caches, and how even the load is.

    python benchmarks/routing.py --trace conversation_trace.jsonl --num-requests 3000 --replicas 4

The trace is one with ``hash_ids`` (https://github.com/kvcache-ai/Mooncake). Replicas are the engine's own scheduler and
prefix cache under the simulator's cost model of a device, the router is the one that serves. Load is given as the
busiest replica's over the mean, by requests, by tokens of requests, and by token rows computed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from chairlift.measure.metrics import request_metrics
from chairlift.scheduling.routing import ROUTES
from chairlift.simulate.catalogue import find_hardware, find_model
from chairlift.simulate.cost import engine_names, roofline
from chairlift.simulate.fleet import Fleet
from chairlift.simulate.setup import capacity, engine_config
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import trace_workload


def over_mean(values: list[int]) -> float:
    return max(values) * len(values) / sum(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--time-scale", type=float, default=1.0)
    args = parser.parse_args()
    deployment = Deployment(
        model=find_model(args.model), hardware=find_hardware(args.hardware), max_model_len=args.max_model_len
    )
    cost = roofline(deployment, engine_names()[0])
    held = capacity(deployment, cost)
    workload = trace_workload(
        args.trace, max_length=args.max_model_len, limit=args.num_requests, time_scale=args.time_scale
    )
    print(f"{workload.description} {args.replicas} replicas of {args.model}, {held.num_token_slots:,} tokens each")
    print("| routing | hit rate | requests | tokens | rows | mean TTFT | p99 TTFT |\n|---|---|---|---|---|---|---|")
    for routing in ROUTES:
        fleet = Fleet(
            engine_config(deployment, prefix_caching=True), held, cost, replicas=args.replicas, routing=routing
        )
        outcome = fleet.run(workload)
        records = [record for steps in outcome.records for record in steps]
        hits = sum(r.cached_tokens for r in records) / sum(r.looked_up_tokens for r in records)
        loads = (
            [sum(r.finished for r in steps) for steps in outcome.records],
            [sum(r.looked_up_tokens + r.rows.decode for r in steps) for steps in outcome.records],
            [sum(r.rows.total for r in steps) for steps in outcome.records],
        )
        metrics = request_metrics(outcome.requests, outcome.duration)
        spread = " | ".join(f"{over_mean(load):.2f}" for load in loads)
        ttft = f"{metrics['mean_ttft_ms']:.0f} ms | {metrics['p99_ttft_ms']:.0f} ms"
        print(f"| {routing} | {hits:.1%} | {spread} | {ttft} |", flush=True)


if __name__ == "__main__":
    main()
