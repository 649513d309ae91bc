"""``chairlift compare``: static against continuous batching on one engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from chairlift.cli.goodput import GoodputCommand, goodput_option
from chairlift.cli.options import check_report, engine_config, engine_options
from chairlift.config import ConfigError, EngineConfig
from chairlift.measure.scenarios import SCENARIOS, WORKED_EXAMPLE_SLOTS

if TYPE_CHECKING:
    from chairlift.engine.executor import Capacity, Executor
    from chairlift.measure.compare import Comparison, Policy
    from chairlift.measure.metrics import UsefulWork
    from chairlift.measure.workload import Workload

DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_STATIC_BATCH_SIZE = 4
DEFAULT_SCALE = 1024


@click.command(cls=GoodputCommand)
@click.argument("scenario", required=False, type=click.Choice(tuple(SCENARIOS)))
@click.option("--trace", type=click.Path(path_type=Path), help="Replay an Azure CSV or a Mooncake JSONL instead.")
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Factor on the times of the trace.")
@click.option(
    "--num-requests",
    "--max-requests",
    type=click.IntRange(1),
    metavar="N",
    help="Instead of the scenario's own number.",
)
@click.option(
    "--scale-to",
    type=click.IntRange(2),
    metavar="N",
    help="Scale prompts so that the longest sequence of the scenario's trace has this many tokens.  [default: "
    f"{DEFAULT_SCALE:,}, so that a CPU ends within minutes; for --trace the model's length]",
)
@click.option("--request-rate", type=float, default=4.0, show_default=True, help="Requests a second, for bursty.")
@click.option(
    "--burstiness", type=float, default=1 / 16, show_default=True, help="For bursty: 1 is Poisson, less is burstier."
)
@click.option(
    "--static-batch-size",
    "static_batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    default=(DEFAULT_STATIC_BATCH_SIZE,),
    show_default=True,
    metavar="N",
    help="Sequences in a static batch; may be given several times.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Runs per policy.")
@goodput_option
@click.option("--matrix-peak", type=float, metavar="GFLOPS", help="Matrix peak of the device in GFLOP/s, to give MFU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the numbers there.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a report there.")
@click.option("--save-detailed", is_flag=True, help="Put every request and every step into the JSON file.")
@engine_options
def compare(
    scenario: str | None,
    trace: Path | None,
    static_batch_sizes: tuple[int, ...],
    static_batch_timeout: float,
    repeats: int,
    goodput: dict[str, float],
    matrix_peak: float | None,
    json_file: Path | None,
    html_file: Path | None,
    save_detailed: bool,
    **options: Any,
) -> None:
    """Run SCENARIO under static and under continuous batching and show what changes.

    Both policies run in turn on the same model and the same requests, so that the machine's noise hits both.
    """
    if (scenario is None) == (trace is None):
        raise click.UsageError("give a scenario or --trace, one of the two")
    if save_detailed and json_file is None:
        raise click.UsageError("--save-detailed adds to the file of --json, which is not given")
    if matrix_peak is not None and matrix_peak <= 0:
        raise click.BadParameter("must be above 0", param_hint="--matrix-peak")
    for file in (json_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{file.absolute().parent}, where {file.name} is to be written, is no directory")
    check_report(html_file)
    chosen = {
        name: options.pop(name) for name in ("time_scale", "num_requests", "scale_to", "request_rate", "burstiness")
    }
    config = _config(scenario, options)

    # Here and not above: --help should not have to load torch.
    from chairlift.engine.build import build_executor
    from chairlift.measure.drive import MeasurementError
    from chairlift.measure.workload import WorkloadError

    executor = build_executor(config)
    try:
        workload = _workload(scenario, trace, executor.capacity(), config, chosen)
        policies = _policies(static_batch_sizes, static_batch_timeout, config.max_num_seqs)
        work = _useful_work(config, matrix_peak)
        comparison = _run(workload, executor, config, policies, repeats, goodput, work)
    except (WorkloadError, MeasurementError) as error:
        raise ConfigError(str(error)) from error
    finally:
        executor.close()
    _show(comparison, json_file, html_file, save_detailed)


# This command runs every way to batch, so those flags are its own; and its steps go into the JSON file.
ENGINE_FLAGS_WITHOUT_EFFECT = ("batching", "static_batch_size", "step_log")
compare.params = [param for param in compare.params if param.name not in ENGINE_FLAGS_WITHOUT_EFFECT]


def _config(scenario: str | None, options: dict[str, Any]) -> EngineConfig:
    context = click.get_current_context()
    if context.get_parameter_source("max_num_seqs") is click.core.ParameterSource.DEFAULT:
        options["max_num_seqs"] = WORKED_EXAMPLE_SLOTS if scenario == "worked-example" else DEFAULT_MAX_NUM_SEQS
    return engine_config(None, **options)


def _workload(
    scenario: str | None, trace: Path | None, capacity: Capacity, config: EngineConfig, chosen: dict[str, Any]
) -> Workload:
    from chairlift.measure.scenarios import ScenarioOptions, build_scenario
    from chairlift.measure.traces import trace_workload

    seed = config.seed or 0
    longest = min(capacity.max_model_len, chosen["scale_to"] or (capacity.max_model_len if trace else DEFAULT_SCALE))
    if trace is not None:
        return trace_workload(
            trace,
            max_length=longest,
            vocab_size=capacity.vocab_size,
            seed=seed,
            time_scale=chosen["time_scale"],
            limit=chosen["num_requests"],
        )
    assert scenario is not None  # noqa: S101 - one of the two is given
    return build_scenario(
        scenario,
        ScenarioOptions(
            max_length=longest,
            vocab_size=capacity.vocab_size,
            seed=seed,
            num_requests=chosen["num_requests"],
            request_rate=chosen["request_rate"],
            burstiness=chosen["burstiness"],
        ),
    )


def _policies(sizes: Sequence[int], timeout: float, max_num_seqs: int) -> list[Policy]:
    from chairlift.measure.compare import Policy

    static = [Policy("static", size, timeout) for size in dict.fromkeys(sizes)]
    return [*static, Policy("continuous", max_num_seqs)]


def _useful_work(config: EngineConfig, matrix_peak: float | None) -> UsefulWork | None:
    if matrix_peak is None:
        return None
    from chairlift.measure.flops import useful_work
    from chairlift.model.config import read_config
    from chairlift.model.source import resolve

    return useful_work(read_config(resolve(config.model, config.revision)), matrix_peak * 1e9)


def _run(
    workload: Workload,
    executor: Executor,
    config: EngineConfig,
    policies: Sequence[Policy],
    repeats: int,
    goodput: dict[str, float],
    work: UsefulWork | None,
) -> Comparison:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from chairlift.measure.compare import compare as run_comparison

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("warm-up", total=repeats * len(policies) * len(workload.requests))

        def on_run(policy: Policy, repeat: int) -> Callable[[], None]:
            progress.update(task, description=f"{policy.name}, run {repeat + 1} of {repeats}")
            return lambda: progress.advance(task)

        return run_comparison(
            workload,
            executor,
            config,
            policies,
            repeats=repeats,
            seed=config.seed or 0,
            slos=goodput,
            work=work,
            on_run=on_run,
        )


def _show(comparison: Comparison, json_file: Path | None, html_file: Path | None, detailed: bool) -> None:
    from chairlift.measure.compare import to_json
    from chairlift.measure.table import comparison_table

    Console().print(comparison_table(comparison))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(comparison, detailed=detailed), indent=1) + "\n", encoding="utf-8")
    if html_file is not None:
        from chairlift.measure.report import html_report

        html_file.write_text(html_report(comparison), encoding="utf-8")
