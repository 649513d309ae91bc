"""``chairlift plan``: how many sequences fit, with the arithmetic shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chairlift.cli.goodput import GoodputCommand, goodput_option
from chairlift.config import ConfigError

if TYPE_CHECKING:
    from chairlift.simulate.cost import StepCost
    from chairlift.simulate.lengths import Lengths
    from chairlift.simulate.measured import MeasuredCost
    from chairlift.simulate.planner import Plan
    from chairlift.simulate.sizes import Deployment

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_INPUT, DEFAULT_OUTPUT = "lognormal:220:1.2", "lognormal:230:1"
AIMS = ("safe", "expected", "worst")

_DEPLOYMENT_OPTIONS = (
    click.option(
        "--hardware",
        default="a100-80g",
        show_default=True,
        metavar="NAME",
        help="a100-40g, a100-80g, h100, h200, l4, l40s, or this: the machine at hand, as calibrated.",
    ),
    click.option(
        "--tensor-parallel-size",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Devices that share the model.",
    ),
    click.option(
        "--dtype",
        default="bfloat16",
        show_default=True,
        metavar="NAME",
        help="Precision of the weights: bfloat16, float16, float32, fp8, int8 or int4.",
    ),
    click.option(
        "--kv-cache-dtype",
        metavar="NAME",
        help="Precision of keys and values: bfloat16, float16, float32, fp8 or int8 (with a scale for each token and "
        "head).  [default: the weights', if they have two bytes or more, else bfloat16]",
    ),
    click.option("--max-model-len", type=int, metavar="N", help="Longest sequence in tokens.  [default: the model's]"),
    click.option("--block-size", type=int, default=16, show_default=True, metavar="N", help="Tokens in a KV block."),
    click.option(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="Share of each device's memory for weights and KV cache.  [default: 0.90, and 0.50 for this machine]",
    ),
    click.option(
        "--swap-space",
        type=float,
        default=0.0,
        show_default=True,
        metavar="GIB",
        help="Host memory for swapped KV blocks, for each device.",
    ),
    click.option("--max-num-batched-tokens", type=int, metavar="N", help="Most token rows in a step."),
    click.option(
        "--input-len",
        metavar="LENGTHS",
        help="Prompt tokens: N, exponential:MEAN[:CAP], lognormal:MEAN:CV[:CAP] or uniform:LOW:HIGH.  [default: "
        f"{DEFAULT_INPUT}, a chat service]",
    ),
    click.option(
        "--output-len", metavar="LENGTHS", help=f"Output tokens, written the same way.  [default: {DEFAULT_OUTPUT}]"
    ),
    click.option(
        "--trace", type=click.Path(path_type=Path), help="Take lengths from an Azure CSV or a Mooncake JSONL instead."
    ),
    click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of all draws."),
    click.option(
        "--engine",
        metavar="NAME",
        help="Whose step times: distserve (a lean engine in C++) or vllm-0.2.3, both measured on A100.  [default: "
        "distserve]",
    ),
    click.option(
        "--cost-model",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Step times from a file that --calibrate or --fit wrote, instead.",
    ),
)


def deployment_options(command: F) -> F:
    """Adds the flags that describe a deployment and its requests; read them with the functions below."""
    for option in reversed(_DEPLOYMENT_OPTIONS):
        command = option(command)
    return command


@click.command(cls=GoodputCommand)
@click.argument("model")
@click.option(
    "--aim",
    type=click.Choice(AIMS),
    default="safe",
    show_default=True,
    help="Which value the flags take: safe at the 95th percentile of lengths, expected (memory full, some preemption), "
    "or worst (no preemption ever).",
)
@deployment_options
@goodput_option
@click.option("--explain", is_flag=True, help="Show the arithmetic line by line.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the numbers there.")
def plan(
    model: str, aim: str, goodput: dict[str, float], explain: bool, json_file: Path | None, **options: Any
) -> None:
    """Size a deployment of MODEL and print the flags that follow.

    MODEL is a name of the catalogue (such as codellama-13b or qwen3-8b), a directory with a config.json, a .gguf file,
    or a hub id.
    """
    check_output(json_file)
    from chairlift.model.source import ModelError

    try:
        deployment = read_deployment(model, options)
        cost = read_cost(deployment, model, options)
        sized = _plan(deployment, read_lengths(options), cost, aim, goodput, options["max_num_batched_tokens"])
    except ModelError as error:
        raise ConfigError(str(error)) from error
    click.echo(_summary(sized, model))
    if explain:
        click.echo("\n" + explanation(sized))
    click.echo(f"\nserve it with:\n  {sized.flags(model)}")
    if json_file is not None:
        json_file.write_text(json.dumps(sized.to_json(model), indent=1) + "\n", encoding="utf-8")


def read_deployment(model: str, options: dict[str, Any]) -> Deployment:
    """The deployment that the flags describe, with the default limits of a step."""
    from chairlift.simulate.catalogue import THIS_MACHINE, find_hardware, find_model
    from chairlift.simulate.sizes import KV_BYTES, KV_SCALE_BYTES, PRECISIONS, Deployment, SizingError

    hardware, shape = find_hardware(options["hardware"]), find_model(model)
    on_cpu = hardware.name == THIS_MACHINE
    dtype, kv_dtype = options["dtype"], options["kv_cache_dtype"]
    if dtype not in PRECISIONS:
        raise SizingError(f"--dtype must be one of {', '.join(PRECISIONS)}; got {dtype!r}")
    kv_dtype = kv_dtype or (dtype if PRECISIONS[dtype].weight_bytes >= 2 else "bfloat16")
    if kv_dtype not in KV_BYTES:
        raise SizingError(f"--kv-cache-dtype must be one of {', '.join(KV_BYTES)}; got {kv_dtype!r}")
    share, length = options["gpu_memory_utilization"], options["max_model_len"]
    budget = options["max_num_batched_tokens"]
    if budget is None:
        budget = 512 if on_cpu else 2048
    elif budget < 1:
        raise SizingError(f"--max-num-batched-tokens must be at least 1, got {budget}")
    return Deployment(
        model=shape,
        hardware=hardware,
        tensor_parallel_size=options["tensor_parallel_size"],
        precision=PRECISIONS[dtype],
        kv_itemsize=KV_BYTES[kv_dtype],
        kv_scale_bytes=KV_SCALE_BYTES.get(kv_dtype, 0),
        gpu_memory_utilization=share if share is not None else (0.50 if on_cpu else 0.90),
        max_model_len=length if length is not None else shape.max_position_embeddings,
        max_num_seqs=options.get("max_num_seqs") or min(128, budget),
        max_num_batched_tokens=budget,
        block_size=options["block_size"],
        swap_space=options["swap_space"],
    )


def read_cost(deployment: Deployment, model: str, options: dict[str, Any]) -> StepCost | None:
    """The cost model that the flags name; ``None`` for this machine where it is not calibrated for the model."""
    from chairlift.simulate.catalogue import THIS_MACHINE
    from chairlift.simulate.cost import engine_names, roofline
    from chairlift.simulate.measured import calibration_path, load_cost

    if options["cost_model"] is not None:
        if options["engine"] is not None:
            raise click.UsageError("--engine and --cost-model both say where step times come from; give one of them")
        return _matching(load_cost(options["cost_model"]), deployment)
    if deployment.hardware.name == THIS_MACHINE:
        path = calibration_path(model)
        return _matching(load_cost(path), deployment) if path.is_file() else None
    return roofline(deployment, options["engine"] or engine_names()[0])


def _matching(cost: MeasuredCost, deployment: Deployment) -> MeasuredCost:
    """Refuses step times that were measured in another precision; a step log does not tell in which."""
    if cost.dtype not in ("", deployment.precision.name):
        raise ConfigError(
            f"the step times are those of {cost.dtype}, and --dtype is {deployment.precision.name}; "
            f"give --dtype {cost.dtype}"
        )
    return cost


def read_lengths(options: dict[str, Any]) -> Lengths:
    """The lengths that the flags describe."""
    from chairlift.measure.workload import WorkloadError
    from chairlift.simulate.lengths import SAMPLES, draw_lengths, trace_lengths

    if options["trace"] is None:
        prompt, output = options["input_len"] or DEFAULT_INPUT, options["output_len"] or DEFAULT_OUTPUT
        return draw_lengths(prompt, output, SAMPLES, options["seed"])
    if options["input_len"] or options["output_len"]:
        raise click.UsageError("--trace has its own lengths; leave out --input-len and --output-len")
    try:
        return trace_lengths(options["trace"])
    except WorkloadError as error:
        raise ConfigError(str(error)) from error


def check_output(*files: Path | None) -> None:
    """Refuses a file that could not be written, before any time is spent."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{file.absolute().parent}, where {file.name} is to be written, is no directory")


def _plan(
    deployment: Deployment,
    lengths: Lengths,
    cost: StepCost | None,
    aim: str,
    slos: dict[str, float],
    max_num_batched_tokens: int | None,
) -> Plan:
    from chairlift.simulate.planner import make_plan

    if slos and cost is None:
        raise ConfigError(
            "objectives need step times, and this machine is not calibrated for the model: run "
            "chairlift simulate MODEL --calibrate first, or leave out --goodput"
        )
    return make_plan(deployment, lengths, cost=cost, slos=slos, aim=aim, max_num_batched_tokens=max_num_batched_tokens)


def _summary(plan: Plan, model: str) -> str:
    d = plan.deployment
    lines = [
        f"{model} in {d.precision.name} on {d.tensor_parallel_size} × {d.hardware.title}",
        f"  weights fit:        {d.weight_bytes / 1e9:.2f} GB on each device",
        f"  KV cache:           {d.kv_budget / 1e9:.2f} GB on each device, {d.kv_bytes_per_token:,} bytes a token: "
        f"{d.kv_tokens:,} tokens",
        f"  requests:           {plan.lengths.description}; mean {plan.lengths.mean:,.0f}, P95 "
        f"{plan.lengths.percentile(95):,.0f}, longest {plan.lengths.longest:,} tokens",
        f"  max-num-seqs:       {plan.expected:,} expected (they fill the cache), {plan.safe:,} safe at P95, "
        f"{plan.worst:,} in the worst case of {d.max_model_len:,} tokens each",
        f"  recommended:        {d.max_num_seqs:,}, from {plan.limited_by}",
    ]
    if plan.decode_step is not None and plan.output_throughput is not None:
        lines.append(
            f"  at a full batch:    {plan.decode_step * 1000:.1f} ms a decode step, about "
            f"{plan.output_throughput:,.0f} output tokens/s"
        )
    for name, (limit, value) in plan.slos.items():
        verdict = "met" if value <= limit else "MISSED"
        lines.append(
            f"  {name + ' objective:':<19} {verdict}: {value:,.1f} ms expected at a full batch, {limit:g} allowed"
        )
    return "\n".join(lines)


def explanation(plan: Plan) -> str:
    """The arithmetic, a line for each number."""
    return "\n".join(f"{line.name:<32} = {line.arithmetic}\n{'':<32} = {line.result}" for line in plan.explain())
