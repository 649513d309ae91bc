"""``chairlift bench``: a load generator for any OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import numpy as np
from rich.console import Console

from chairlift.cli.goodput import GoodputCommand, goodput_option
from chairlift.config import ConfigError
from chairlift.measure.arrivals import RAMP_UPS, gamma_arrivals, ramp_arrivals
from chairlift.measure.workload import WorkloadError

if TYPE_CHECKING:
    from chairlift.measure.datasets import BenchRequest
    from chairlift.measure.loadgen import Endpoint, Load

DATASETS = ("random", "sharegpt", "custom", "trace")
BACKENDS = ("openai", "openai-chat", "vllm")
SHOWN = ("ttft", "tpot", "itl", "e2el", "client_queue")
FAILED = 1


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    try:
        numbers = [float(item) for item in value.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= 100 for number in numbers):
        raise click.BadParameter(f"{value!r} is no list of percentiles such as 50,99", ctx, param)
    return numbers


def _names(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    if not set(names) <= set(SHOWN):
        raise click.BadParameter(f"{value!r} is no list of {', '.join(SHOWN)}", ctx, param)
    return names


def _pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    if not all("=" in item for item in value):
        raise click.BadParameter("write NAME=VALUE", ctx, param)
    return {name: text for name, _, text in (item.partition("=") for item in value)}


@click.command(cls=GoodputCommand)
@click.option("--base-url", metavar="URL", help="Of the server.  [default: http://HOST:PORT]")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--backend", "--endpoint-type", type=click.Choice(BACKENDS), default="openai", show_default=True)
@click.option("--endpoint", metavar="PATH", help="[default: /v1/completions, or /v1/chat/completions for openai-chat]")
@click.option("--model", metavar="NAME", help="As the server calls it.  [default: the first that it lists]")
@click.option("--header", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="One more HTTP header.")
@click.option("--extra-body", metavar="JSON", help="An object whose fields are added to every request.")
@click.option("--dataset-name", type=click.Choice(DATASETS), default="random", show_default=True)
@click.option(
    "--dataset-path", "--trace", type=click.Path(path_type=Path), help="A trace, unless another set is named."
)
@click.option("--num-prompts", type=click.IntRange(1), default=1000, show_default=True, metavar="N")
@click.option("--random-input-len", "--input-len", type=click.IntRange(1), default=1024, show_default=True, metavar="N")
@click.option("--random-output-len", type=click.IntRange(1), default=128, show_default=True, metavar="N")
@click.option("--random-range-ratio", type=float, default=0.0, show_default=True, metavar="R")
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    metavar="N",
    help="Send prompts as token ids below N, exactly as long as asked. Without, they are words of about a token each.",
)
@click.option(
    "--output-len",
    "--sharegpt-output-len",
    "--custom-output-len",
    type=click.IntRange(1),
    metavar="N",
    help="Output tokens of every request, whatever the data set says.",
)
@click.option(
    "--scale-to", type=click.IntRange(2), default=8192, show_default=True, help="Longest sequence of a trace."
)
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="Factor on the times of a trace.")
@click.option("--request-rate", type=float, default=math.inf, show_default=True, metavar="R", help="Requests a second.")
@click.option("--burstiness", type=float, default=1.0, show_default=True, help="1 is Poisson, less is burstier.")
@click.option("--max-concurrency", type=click.IntRange(1), metavar="N", help="Most requests open at once.")
@click.option("--ramp-up-strategy", type=click.Choice(RAMP_UPS), help="Move the rate over the run.")
@click.option("--ramp-up-start-rps", type=float, metavar="R")
@click.option("--ramp-up-end-rps", type=float, metavar="R")
@click.option("--num-warmups", type=click.IntRange(0), default=1, show_default=True, metavar="N")
@click.option(
    "--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Ask for exactly the output length."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--request-timeout", type=click.FloatRange(0, min_open=True), default=3600.0, show_default=True)
@goodput_option
@click.option("--percentile-metrics", default=",".join(SHOWN), show_default=True, callback=_names)
@click.option("--metric-percentiles", default="50,99", show_default=True, callback=_numbers)
@click.option("--save-result", is_flag=True, help="Write a JSON file.")
@click.option("--save-detailed", is_flag=True, help="Put every request into it.")
@click.option("--result-dir", type=click.Path(path_type=Path), default=Path())
@click.option("--result-filename", metavar="NAME")
@click.option("--metadata", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="Put into the JSON file.")
@click.option("--disable-tqdm", is_flag=True, help="No progress bar.")
def bench(**options: Any) -> None:
    """Put a load on an OpenAI endpoint and measure what its clients see.

    The names of flags and of the numbers in the JSON file are those of vllm bench serve. Exits with 1 if any request
    failed; what was measured is shown and saved all the same.
    """
    try:
        requests, arrivals = _requests(options)
        endpoint = asyncio.run(_endpoint(options))
        load = asyncio.run(_measure(endpoint, requests, arrivals, options))
    except WorkloadError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(_report(load, endpoint, options))


def _requests(options: dict[str, Any]) -> tuple[list[BenchRequest], list[float] | None]:
    """What is sent, and when; ``None`` for a closed loop."""
    from chairlift.measure import datasets

    rng = np.random.default_rng(options["seed"])
    count, path, name = options["num_prompts"], options["dataset_path"], options["dataset_name"]
    if path is not None and name == "random":
        name = options["dataset_name"] = "trace"
    if path is None and name != "random":
        raise click.UsageError(f"--dataset-name {name} needs a file: --dataset-path FILE")
    vocab_size = None if options["backend"] == "openai-chat" else options["vocab_size"]
    if name == "trace":
        requests = datasets.trace_requests(
            path,
            count=count,
            max_length=options["scale_to"],
            vocab_size=vocab_size,
            seed=options["seed"],
            time_scale=options["time_scale"],
        )
    elif name == "sharegpt":
        requests = datasets.sharegpt_requests(path, count, options["output_len"])
    elif name == "custom":
        requests = datasets.custom_requests(path, count, options["output_len"])
    else:
        requests = datasets.random_requests(
            rng,
            count,
            input_len=options["random_input_len"],
            output_len=options["output_len"] or options["random_output_len"],
            range_ratio=options["random_range_ratio"],
            vocab_size=vocab_size,
        )
    return requests, _arrivals(rng, requests, options)


def _arrivals(rng: np.random.Generator, requests: list[BenchRequest], options: dict[str, Any]) -> list[float] | None:
    rate, count = options["request_rate"], len(requests)
    start, end = options["ramp_up_start_rps"], options["ramp_up_end_rps"]
    if options["ramp_up_strategy"] is not None:
        if start is None or end is None:
            raise click.UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        return ramp_arrivals(rng, count, options["ramp_up_strategy"], start, end, options["burstiness"])
    if start is not None or end is not None:
        raise click.UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    arrivals = gamma_arrivals(rng, count, rate, options["burstiness"])  # checks its arguments, too
    if math.isinf(rate):
        recorded = [request.arrival for request in requests if request.arrival is not None]
        if recorded:
            return recorded
        return None
    return arrivals


async def _endpoint(options: dict[str, Any]) -> Endpoint:
    import aiohttp

    from chairlift.measure.loadgen import CHAT, COMPLETIONS, Endpoint

    base = (options["base_url"] or f"http://{options['host']}:{options['port']}").rstrip("/")
    if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).netloc:
        raise click.BadParameter(f"{base!r} is no http or https address", param_hint="--base-url")
    base = base.removesuffix("/v1")
    chat = options["backend"] == "openai-chat"
    headers = dict(options["header"])
    if "OPENAI_API_KEY" in os.environ and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    try:
        extra = json.loads(options["extra_body"] or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise click.BadParameter("must be a JSON object", param_hint="--extra-body")
    model = options["model"]
    if model is None:
        try:
            async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{base}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"cannot learn from {base}/v1/models which model it serves: {error}") from error
    return Endpoint(
        url=base + (options["endpoint"] or (CHAT if chat else COMPLETIONS)),
        model=model,
        chat=chat,
        ignore_eos=options["ignore_eos"],
        extra_body=extra,
        headers=headers,
        timeout=options["request_timeout"],
    )


async def _measure(
    endpoint: Endpoint, requests: list[BenchRequest], arrivals: list[float] | None, options: dict[str, Any]
) -> Load:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from chairlift.measure.datasets import BenchRequest
    from chairlift.measure.loadgen import run_load, warm_up

    if options["num_warmups"]:
        # Not one of the requests to come, which a prefix cache would then know.
        first = requests[0]
        other = BenchRequest(first.prompt[::-1], first.prompt_tokens, min(8, first.output_tokens))
        error = await warm_up(endpoint, other, options["num_warmups"])
        if error is not None:
            raise ConfigError(f"the warm-up of {endpoint.url} failed: {error}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=options["disable_tqdm"]) as progress:
        task = progress.add_task("requests", total=len(requests))
        return await run_load(
            endpoint, requests, arrivals, options["max_concurrency"], on_finish=lambda: progress.advance(task)
        )


def _report(load: Load, endpoint: Endpoint, options: dict[str, Any]) -> int:
    from chairlift.measure.bench_result import OVER, load_metrics, result_json, result_table

    percentiles = options["metric_percentiles"]
    metrics = load_metrics(load, options["goodput"], percentiles)
    console = Console()
    console.print(result_table(metrics, options["percentile_metrics"], percentiles))
    console.print(OVER, style="dim")
    for note in _notes(load, metrics, options):
        click.echo(f"note: {note}", err=True)
    if options["save_result"] or options["result_filename"] or options["save_detailed"]:
        result = result_json(load, metrics, _settings(endpoint, options), detailed=options["save_detailed"])
        name = options["result_filename"] or f"{options['backend']}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.json"
        file = options["result_dir"] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        click.echo(f"saved {file}", err=True)
    failed = [record.error for record in load.records if record.error is not None]
    if load.gave_up is not None:
        click.echo(f"error: ended early: {load.gave_up}", err=True)
    elif failed:
        click.echo(
            f"error: {len(failed)} of {len(load.records)} requests failed, the first with: {failed[0]}", err=True
        )
    return FAILED if failed or load.gave_up is not None else 0


def _notes(load: Load, metrics: dict[str, float], options: dict[str, Any]) -> list[str]:
    """What could make the numbers mean something else than they seem to."""
    notes = []
    if load.cached_tokens:
        share = load.cached_tokens / max(1, metrics.get("total_input_tokens", 0))
        notes.append(
            f"the server took {share:.0%} of the prompt tokens from its prefix cache; --seed changes the prompts"
        )
    elif load.cached_tokens is None:
        notes.append(
            "the server does not say how much it took from a prefix cache. If it has one and has seen "
            f"--seed {options['seed']} before, TTFT is too good; another --seed makes other prompts"
        )
    queue = metrics.get("mean_client_queue_ms", 0.0)
    if queue > 0.05 * metrics.get("mean_e2el_ms", math.inf):
        notes.append(
            f"requests were due {queue:.0f} ms, on average, before they were sent: --max-concurrency, or this client, "
            "held them back. TTFT and E2E latency count from when they were due"
        )
    return notes


def _settings(endpoint: Endpoint, options: dict[str, Any]) -> dict[str, Any]:
    rate = options["request_rate"]
    return {
        "endpoint_type": options["backend"],
        "backend": options["backend"],
        "model_id": endpoint.model,
        "dataset": options["dataset_name"],
        "num_prompts": options["num_prompts"],
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options["burstiness"],
        "max_concurrency": options["max_concurrency"],
        "seed": options["seed"],
        **options["metadata"],
    }
