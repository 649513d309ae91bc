"""``chairlift simulate``: the engine's schedulers on hardware that is not at hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from chairlift.cli.goodput import GoodputCommand, goodput_option
from chairlift.cli.plan import (
    DEFAULT_INPUT,
    DEFAULT_OUTPUT,
    check_output,
    deployment_options,
    read_cost,
    read_deployment,
)
from chairlift.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from chairlift.measure.compare import Comparison
    from chairlift.measure.workload import Workload
    from chairlift.simulate.measured import MeasuredCost
    from chairlift.simulate.search import Setting

CASE_STUDY = "case-study"
DEFAULT_REQUESTS, SEARCHED_REQUESTS = 500, 1000
SEARCHES = ("rate", "limits", "replicas")


@click.command(cls=GoodputCommand)
@click.argument("model", required=False)
@deployment_options
@click.option("--max-num-seqs", type=int, default=128, show_default=True, metavar="N", help="Most sequences in a step.")
@click.option(
    "--static-batch-size",
    "static_batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    metavar="N",
    help="Also simulate static batches of N sequences; may be given several times.",
)
@click.option(
    "--static-batch-timeout",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    metavar="S",
    help="Seconds to wait for a static batch to fill.",
)
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Engines.")
@click.option(
    "--routing",
    default="least-load",
    show_default=True,
    metavar="NAME",
    help="Which replica gets a request: round-robin, least-load or prefix-aware.",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=None,
    help="Compute equal beginnings of prompts once.  [default: if any prompts begin alike]",
)
@click.option(
    "--preemption-mode",
    type=click.Choice(("auto", "recompute", "swap")),
    default="auto",
    show_default=True,
    help="What to do when KV memory runs out.",
)
@click.option("--request-rate", type=float, metavar="R", help="Requests a second, arriving at random.")
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Of the arrivals: 1 is Poisson, less is burstier (gamma distributed gaps).",
)
@click.option("--clients", type=click.IntRange(1), metavar="N", help="A closed loop of N clients instead.")
@click.option(
    "--num-requests",
    type=click.IntRange(1),
    metavar="N",
    help=f"How many.  [default: {DEFAULT_REQUESTS}, for --find {SEARCHED_REQUESTS:,}]",
)
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Factor on the times of the trace.")
@goodput_option
@click.option(
    "--find",
    type=click.Choice(SEARCHES),
    help="rate: the largest that meets the objectives. limits: the best --max-num-seqs and --max-num-batched-tokens. "
    "replicas: the fewest that meet the objectives.",
)
@click.option(
    "--attainment",
    type=float,
    default=0.99,
    show_default=True,
    metavar="SHARE",
    help="Of the requests, which must meet all objectives.",
)
@click.option("--price", type=click.FloatRange(0), metavar="P", help="Of one device for an hour.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the numbers there.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a report there.")
@click.option("--save-detailed", is_flag=True, help="Put every request and every step into the JSON file.")
@click.option("--calibrate", is_flag=True, help="Fit the cost model to the engine on this machine, and store it.")
@click.option(
    "--fit",
    "fit_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Fit a cost model to the step log of a server (serve --step-log).",
)
@click.option(
    "--save-cost",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where --calibrate and --fit write.  [default: the cache, and FILE.cost.json]",
)
def simulate(
    model: str | None,
    calibrate: bool,
    fit_file: Path | None,
    save_cost: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Simulate MODEL on hardware that is not at hand, with the very schedulers that serve.

    MODEL is as for chairlift plan. MODEL "case-study" simulates the move of a code-generation service from static to
    continuous batching and holds it against the figures reported of it.

    Without --request-rate, --clients or --trace, all requests come at once.
    """
    check_output(json_file, html_file, save_cost)
    if fit_file is not None:
        _fit(fit_file, options["block_size"], save_cost)
        return
    if model is None:
        raise click.UsageError("give a MODEL to simulate, such as codellama-13b, or case-study")
    if calibrate:
        _calibrate(model, options, save_cost)
        return
    if save_cost is not None:
        raise click.UsageError("--save-cost goes with --calibrate or --fit")
    _check_work(options)
    if options["save_detailed"] and json_file is None:
        raise click.UsageError("--save-detailed adds to the file of --json, which is not given")

    from chairlift.measure.workload import WorkloadError
    from chairlift.model.source import ModelError

    try:
        if model == CASE_STUDY:
            _case_study(json_file)
            return
        setting, workload = _read(model, options)
        if options["find"] is not None:
            _find(setting, workload, options, json_file)
        else:
            _show(model, setting, workload, options, json_file, html_file)
    except (WorkloadError, ModelError) as error:
        raise ConfigError(str(error)) from error


def _check_work(options: dict[str, Any]) -> None:
    ways = [f"--{name.replace('_', '-')}" for name in ("trace", "request_rate", "clients") if options[name] is not None]
    if len(ways) > 1:
        raise click.UsageError(f"{' and '.join(ways)} are different ways for requests to come; give one of them")
    if options["find"] == "rate" and options["clients"] is not None:
        raise click.UsageError("--find rate changes the rate of arrivals, and --clients have none; leave out --clients")
    if options["find"] and options["static_batch_sizes"]:
        raise click.UsageError("--find searches for continuous batching; leave out --static-batch-size")
    if options["max_num_seqs"] < 1:
        raise click.UsageError(f"--max-num-seqs must be at least 1, got {options['max_num_seqs']}")


def _read(model: str, options: dict[str, Any]) -> tuple[Setting, Workload]:
    from chairlift.simulate.lengths import draw_lengths
    from chairlift.simulate.search import Setting
    from chairlift.simulate.workloads import shares_prefixes, synthetic_workload, trace_workload

    if options["max_num_batched_tokens"] is None:
        options["max_num_batched_tokens"] = max(2048, options["max_num_seqs"])
    deployment = read_deployment(model, options)
    cost = read_cost(deployment, model, options)
    if cost is None:
        raise ConfigError(
            f"this machine is not calibrated for {model}: run chairlift simulate {model} --calibrate first"
        )
    longest = deployment.max_model_len
    if options["trace"] is not None:
        if options["input_len"] or options["output_len"]:
            raise click.UsageError("--trace has its own lengths; leave out --input-len and --output-len")
        workload = trace_workload(
            options["trace"], max_length=longest, time_scale=options["time_scale"], limit=options["num_requests"]
        )
    else:
        count = options["num_requests"] or (SEARCHED_REQUESTS if options["find"] else DEFAULT_REQUESTS)
        prompt, output = options["input_len"] or DEFAULT_INPUT, options["output_len"] or DEFAULT_OUTPUT
        lengths = draw_lengths(prompt, output, count, options["seed"]).clip(longest)
        rate = options["request_rate"]
        if rate is None:
            rate = 1.0 if options["find"] == "rate" else math.inf
        workload = synthetic_workload(
            lengths,
            rate=rate,
            burstiness=options["burstiness"],
            clients=options["clients"],
            seed=options["seed"],
        )
    caching = options["prefix_caching"]
    return (
        Setting(
            deployment=deployment,
            cost=cost,
            replicas=options["replicas"],
            routing=options["routing"],
            prefix_caching=shares_prefixes(workload) if caching is None else caching,
            preemption_mode=options["preemption_mode"],
            static_batch_timeout=options["static_batch_timeout"],
        ),
        workload,
    )


def _show(
    model: str,
    setting: Setting,
    workload: Workload,
    options: dict[str, Any],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    from chairlift.measure.table import comparison_table
    from chairlift.simulate.run import MOST_DETAILED, simulate_policies, simulation_json

    detail = len(workload.requests) <= MOST_DETAILED
    if not detail and (html_file is not None or options["save_detailed"]):
        raise ConfigError(
            f"--html and --save-detailed show every request, which is too much for {len(workload.requests):,}; take "
            f"--num-requests {MOST_DETAILED} or fewer"
        )
    comparison = simulate_policies(
        setting,
        workload,
        options["static_batch_sizes"],
        slos=options["goodput"],
        price=options["price"],
        detail=detail,
        seed=options["seed"],
        name=model,
    )
    console = Console()
    console.print(_fleet(setting))
    console.print(comparison_table(comparison))
    console.print(_prices(comparison))
    if json_file is not None:
        document = simulation_json(comparison, setting, detailed=options["save_detailed"])
        _write_json(json_file, document)
    if html_file is not None:
        from chairlift.measure.report import html_report

        html_file.write_text(html_report(comparison), encoding="utf-8")


def _fleet(setting: Setting) -> str:
    deployment = setting.deployment
    devices = f"{deployment.tensor_parallel_size} × {deployment.hardware.title}"
    if setting.replicas == 1:
        return f"simulated on {devices}"
    return f"simulated on {setting.replicas} replicas of {devices}, behind {setting.routing} routing"


def _prices(comparison: Comparison) -> str:
    lines = []
    for result in comparison.results:
        price = result.median("price_per_million_output_tokens")
        if price is not None:
            both = result.median("price_per_million_tokens")
            lines.append(
                f"{result.policy.name}: {price:.3f} for a million output tokens, {both:.3f} for a million of all tokens"
            )
    return "\n".join(lines)


def _find(setting: Setting, workload: Workload, options: dict[str, Any], json_file: Path | None) -> None:
    from chairlift.simulate.search import (
        Attainment,
        best_limits,
        cost_per_million,
        describe_limits,
        fewest_replicas,
        largest_rate,
        outcome_metrics,
    )

    def note(line: str) -> None:
        click.echo(f"  {line}", err=True)

    found: dict[str, Any] = {
        "schema": "chairlift.search/1",
        "find": options["find"],
        "objectives_ms": options["goodput"],
    }
    if options["find"] == "limits":
        tried = best_limits(setting, workload, options["goodput"], note)
        click.echo("best limits:\n  " + "\n  ".join(describe_limits(tried)))
        best = replace(
            setting.deployment,
            max_num_seqs=tried[0].max_num_seqs,
            max_num_batched_tokens=tried[0].max_num_batched_tokens,
        )
        setting = replace(setting, deployment=best)
        found |= {
            "max_num_seqs": best.max_num_seqs,
            "max_num_batched_tokens": best.max_num_batched_tokens,
            "metrics": tried[0].metrics,
        }
    else:
        goal = Attainment(options["goodput"], options["attainment"])
        share = f"{goal.share:.4g} of the requests meet {_objectives(options['goodput'])}"
        if options["find"] == "rate":
            rate = largest_rate(setting, workload, goal, note)
            found["request_rate"] = rate
            if rate is None:
                raise ConfigError(f"at no rate do {share}: one request alone is too slow")
            click.echo(f"largest rate: {rate:.3g} requests/s, up to which {share}")
            from chairlift.simulate.fleet import with_rate

            workload = with_rate(workload, rate)
        else:
            replicas = fewest_replicas(setting, workload, goal, note)
            found["replicas"] = replicas
            if replicas is None:
                raise ConfigError(
                    f"with no number of replicas do {share}: one request alone is too slow, or all at once"
                )
            click.echo(f"fewest replicas: {replicas}, with which {share}")
            setting = replace(setting, replicas=replicas)
        found["metrics"] = outcome_metrics(setting.run(workload), options["goodput"])
    if options["price"] is not None:
        devices = setting.replicas * setting.deployment.tensor_parallel_size
        prices = cost_per_million(found["metrics"], options["price"], devices)
        found |= prices
        click.echo(
            f"{devices} devices at {options['price']:g} an hour: "
            f"{prices['price_per_million_output_tokens']:.3f} for a million output tokens, "
            f"{prices['price_per_million_tokens']:.3f} for a million of all tokens"
        )
    if json_file is not None:
        _write_json(json_file, found)


def _objectives(slos: dict[str, float]) -> str:
    return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in slos.items())


def _calibrate(model: str, options: dict[str, Any], save_cost: Path | None) -> None:
    from chairlift.execution.local import LocalExecutor
    from chairlift.simulate.calibrate import calibrate
    from chairlift.simulate.measured import calibration_path

    config = EngineConfig(
        model=model,
        max_model_len=options["max_model_len"],
        block_size=options["block_size"],
        max_num_seqs=min(options["max_num_seqs"], options["max_num_batched_tokens"] or options["max_num_seqs"]),
        max_num_batched_tokens=options["max_num_batched_tokens"],
        gpu_memory_utilization=options["gpu_memory_utilization"],
        enable_prefix_caching=False,
    )
    executor = LocalExecutor(config)
    try:
        cost = calibrate(executor, config, note=lambda line: click.echo(line, err=True))
    finally:
        executor.close()
    _store(cost, save_cost or calibration_path(model))
    click.echo(f"use it with: chairlift simulate {model} --hardware this")


def _fit(path: Path, block_size: int, save_cost: Path | None) -> None:
    from chairlift.simulate.calibrate import fit_step_log

    target = save_cost or path.with_name(path.name + ".cost.json")
    _store(fit_step_log(path, block_size), target)
    click.echo(f"use it with: chairlift simulate MODEL --cost-model {target}")


def _store(cost: MeasuredCost, path: Path) -> None:
    cost.save(path)
    click.echo(f"fitted to {cost.steps:,} steps with a mean error of {cost.mean_error:.1%}; written to {path}")


def _case_study(json_file: Path | None) -> None:
    from chairlift.simulate.case_study import run_case_study

    study = run_case_study(note=lambda line: click.echo(f"  {line}", err=True))
    click.echo(study.report())
    if json_file is not None:
        _write_json(json_file, study.to_json())


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
