"""Flags that several commands share, named as vLLM's are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from chairlift.config import (
    ATTENTION_BACKENDS,
    BATCHING,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    QUANTIZATIONS,
    TOOL_CALL_PARSERS,
    ConfigError,
    EngineConfig,
    ServerConfig,
)
from chairlift.scheduling.config import POLICIES, PREEMPTION_MODES, VICTIM_RULES

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def byte_size(text: str) -> int:
    """A number of bytes: ``2000000000``, ``2G`` (decimal), ``2GiB`` (binary)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write bytes, or a number with K, M, G, T or KiB, MiB, GiB")
    number, letter, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " "))


_ENGINE_OPTIONS = (
    click.option("--model", "model_option", metavar="MODEL", help="The same as the positional MODEL."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        show_default=True,
        help="Precision of weights and activations. auto: bfloat16 where the device computes in it, else float32.",
    ),
    click.option(
        "--quantization",
        type=click.Choice(QUANTIZATIONS),
        help="Compute products in int8 on the CPU: half the memory traffic, a little less exact.",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CACHE_DTYPES),
        default="auto",
        show_default=True,
        help="Precision of cached keys and values. auto: the model's; int8: about half of bfloat16's memory.",
    ),
    click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Where to compute."),
    click.option("--max-model-len", type=int, metavar="N", help="Longest sequence in tokens.  [default: the model's]"),
    click.option("--block-size", type=int, default=16, show_default=True, metavar="N", help="Tokens in a KV block."),
    click.option(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="Share of the device's memory for weights and KV cache; on the CPU, of the memory that is really "
        "available, container limits included.  [default: 0.90 on CUDA, 0.50 on the CPU]",
    ),
    click.option(
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="SIZE",
        help="Size of the KV cache (such as 2GiB), instead of a share.",
    ),
    click.option(
        "--swap-space",
        type=float,
        default=0.0,
        show_default=True,
        metavar="GIB",
        help="Host memory for KV blocks of requests that are put aside.",
    ),
    click.option(
        "--max-num-seqs", type=int, default=128, show_default=True, metavar="N", help="Most sequences in a step."
    ),
    click.option(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="Most token rows in a step; longer prompts are computed in chunks.  [default: by device]",
    ),
    click.option(
        "--tensor-parallel-size",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Processes that share the model, each with a part of every layer; on CUDA each has a GPU.",
    ),
    click.option("--enforce-eager", is_flag=True, help="Run without captured graphs (there are none yet)."),
    click.option(
        "--attention-backend",
        type=click.Choice(ATTENTION_BACKENDS),
        default="auto",
        show_default=True,
        help="auto: the fastest that the device has.",
    ),
    click.option("--num-threads", type=int, metavar="N", help="CPU compute threads.  [default: one for each core]"),
    click.option(
        "--cpu-threads-bind",
        metavar="CORES",
        help="Bind each CPU compute thread to a core of its own: 0-3,8 or auto for all.  [default: not bound]",
    ),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        show_default=True,
        help="Compute equal beginnings of prompts once.",
    ),
    click.option(
        "--scheduling-policy",
        type=click.Choice(POLICIES),
        default="fcfs",
        show_default=True,
        help="fcfs: in order of arrival. priority: lower values of a request's priority first.",
    ),
    click.option(
        "--preemption-mode",
        type=click.Choice(PREEMPTION_MODES),
        default="auto",
        show_default=True,
        help="When KV memory runs out: recompute later, swap to the host, or whichever is estimated to cost less.",
    ),
    click.option(
        "--preemption-victim",
        type=click.Choice(VICTIM_RULES),
        default="latest",
        show_default=True,
        help="Who gives way among those of the lowest priority that came later: the latest, or the one with the least "
        "computed.",
    ),
    click.option(
        "--admission-reserve/--no-admission-reserve",
        default=False,
        show_default=True,
        help="Admit only while what the running requests are expected to grow by still fits.",
    ),
    click.option(
        "--max-num-partial-prefills",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Prompts that a step may leave half way; beside so many, others begin only if the step completes them.",
    ),
    click.option(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="While others wait for their prompts, one with more tokens left than this gets at most this many rows of "
        "a step.  [default: half a step for prompts longer than a step]",
    ),
    click.option(
        "--batching",
        type=click.Choice(BATCHING),
        default="continuous",
        show_default=True,
        help="continuous: the batch is decided at every step. static: a batch is filled and kept to its end.",
    ),
    click.option(
        "--static-batch-size", type=int, default=8, show_default=True, metavar="N", help="Sequences in a static batch."
    ),
    click.option(
        "--static-batch-timeout",
        type=float,
        default=0.1,
        show_default=True,
        metavar="S",
        help="Seconds to wait for a static batch to fill.",
    ),
    click.option(
        "--step-log", type=click.Path(dir_okay=False), metavar="FILE", help="Write a line of JSON for each step."
    ),
    click.option(
        "--step-timeout",
        type=float,
        default=60.0,
        show_default=True,
        metavar="S",
        help="Seconds without a finished step, while there is work, after which the engine counts as wedged; serve "
        "then kills it and starts another.",
    ),
    click.option(
        "--seed", type=int, metavar="N", help="Of the seeds drawn for requests that have none.  [default: random]"
    ),
)


_SERVER_OPTIONS = (
    click.option(
        "--api-key",
        "api_keys",
        multiple=True,
        envvar="CHAIRLIFT_API_KEY",
        show_envvar=True,
        metavar="KEY",
        help="Key that clients must send; may be given several times. In the environment, spaces separate keys.",
    ),
    click.option("--ssl-keyfile", metavar="FILE", help="PEM file with the server's key, for HTTPS."),
    click.option("--ssl-certfile", metavar="FILE", help="PEM file with its certificate, and those in between."),
    click.option(
        "--ssl-ca-certs", metavar="FILE", help="PEM file with authorities that sign the certificates of clients."
    ),
    click.option(
        "--ssl-cert-reqs",
        type=click.IntRange(0, 2),
        metavar="0|1|2",
        help="Certificates of clients: 0 asks for none, 1 checks what is offered, 2 insists.  [default: 2 with "
        "--ssl-ca-certs]",
    ),
    click.option(
        "--allowed-origins",
        multiple=True,
        metavar="ORIGIN",
        help="Web pages of this origin may use the API (CORS); * for all. These three take several, one flag each or "
        "as a JSON array.  [default: none]",
    ),
    click.option("--allowed-methods", multiple=True, metavar="METHOD", help="What they may call.  [default: *]"),
    click.option("--allowed-headers", multiple=True, metavar="HEADER", help="What they may send.  [default: *]"),
    click.option("--allow-credentials", is_flag=True, help="Let browsers send cookies along."),
    click.option("--root-path", default="", metavar="PATH", help="Path under which a proxy shows the server."),
    click.option(
        "--max-body-size",
        type=byte_size,
        default="4MiB",
        show_default=True,
        metavar="SIZE",
        help="Larger request bodies get a 413.",
    ),
    click.option(
        "--max-num-queued-reqs",
        type=int,
        default=1024,
        show_default=True,
        metavar="N",
        help="Most sequences that may wait for a place; further requests get a 429.",
    ),
    click.option(
        "--request-timeout",
        type=float,
        metavar="S",
        help="Seconds from a request to the end of its answer, after which it gets a 504, or its stream an error.  "
        "[default: any time]",
    ),
    click.option(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        show_default=True,
        metavar="S",
        help="Seconds that open requests get to end after SIGTERM.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="text",
        show_default=True,
        help="json: an object a line, on the standard error output.",
    ),
    click.option(
        "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="The least to log."
    ),
    click.option(
        "--enable-log-requests/--no-enable-log-requests",
        default=False,
        show_default=True,
        help="Log a line for each request, with its tokens and times.",
    ),
    click.option(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="OTLP collector to send a trace span for each request to, over HTTP; needs chairlift[otel].",
    ),
    click.option(
        "--tool-call-parser",
        type=click.Choice(TOOL_CALL_PARSERS),
        help="How the model writes calls of tools.  [default: as its chat template tells]",
    ),
    click.option(
        "--enable-auto-tool-choice",
        is_flag=True,
        expose_value=False,
        help="Changes nothing, and is taken because vLLM needs it: models that can call tools may.",
    ),
)


def server_options(command: F) -> F:
    """Adds the flags of :class:`ServerConfig`; turn them into one with :func:`server_config`."""
    for option in reversed(_SERVER_OPTIONS):
        command = option(command)
    return command


def server_config(options: dict[str, Any]) -> ServerConfig:
    """Builds the settings from those of the flags that are the server's, and takes them out of ``options``.

    Raises:
        ConfigError: settings that cannot work.
    """
    mine = {field.name: options.pop(field.name) for field in fields(ServerConfig) if field.name in options}
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if values := _flattened(mine[name], f"--{name.replace('_', '-')}"):
            mine[name] = values
        else:
            del mine[name]
    return ServerConfig(**mine)


def _flattened(values: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """What a flag was given: each value once, or JSON arrays of them, which is how vLLM takes them."""
    flat: list[str] = []
    for value in values:
        if not value.startswith("["):
            flat.append(value)
            continue
        try:
            array = json.loads(value)
        except ValueError:
            array = None
        if not isinstance(array, list) or not all(isinstance(item, str) for item in array):
            raise ConfigError(f"{flag} {value} is not a JSON array of strings")
        flat += array
    return tuple(flat)


def engine_options(command: F) -> F:
    """Adds the flags of :class:`EngineConfig`; turn them into one with :func:`engine_config`."""
    for option in reversed(_ENGINE_OPTIONS):
        command = option(command)
    return command


def engine_config(model: str | None, model_option: str | None, **options: Any) -> EngineConfig:
    """Builds the settings from the flags, and the model from its positional or its named form.

    Raises:
        click.UsageError: both forms are given and differ.
        ConfigError: settings that cannot work.
    """
    if model and model_option and model != model_option:
        raise click.UsageError(f"the model is given twice: {model!r} and --model {model_option!r}; give it once")
    return EngineConfig(model=model or model_option or EngineConfig.model, **options)


def check_report(html_file: Path | None) -> None:
    """Finds out before the work begins whether its report can be drawn.

    Raises:
        ConfigError: it cannot; the message says what to install.
    """
    if html_file is not None and find_spec("matplotlib") is None:
        raise ConfigError(
            "--html draws its pictures with matplotlib, which is not installed; run: pip install 'chairlift[report]'"
        )
