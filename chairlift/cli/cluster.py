"""Flags for replicas on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from chairlift.cluster.config import ClusterConfig, check_replicas
from chairlift.config import ConfigError
from chairlift.scheduling.routing import ROUTES

F = TypeVar("F", bound=Callable[..., Any])

_CLUSTER_OPTIONS = (
    click.option(
        "--cluster",
        metavar="ray[://HOST:PORT]",
        help="Run the engine as replicas on a Ray cluster; needs chairlift[cluster]. ray: the one that this machine is "
        "part of, or else a new one of this machine alone. ray://HOST:PORT: the one whose head is there.",
    ),
    click.option(
        "--replicas", type=int, metavar="N", help="Engines, each a whole model; needs --cluster.  [default: 1]"
    ),
    click.option(
        "--routing",
        type=click.Choice(ROUTES),
        help="Which replica gets a request. prefix-aware: the one that lately got the longest equal beginning, within "
        "a bound on its load.  [default: prefix-aware]",
    ),
    click.option(
        "--admin-key",
        envvar="CHAIRLIFT_ADMIN_KEY",
        show_envvar=True,
        metavar="KEY",
        help="Opens POST /scale, which changes the number of replicas.",
    ),
)


def cluster_options(command: F) -> F:
    """Adds the flags of :class:`ClusterConfig`; turn them into one with :func:`cluster_config`."""
    for option in reversed(_CLUSTER_OPTIONS):
        command = option(command)
    return command


def cluster_config(options: dict[str, Any]) -> ClusterConfig | None:
    """Builds the settings from the flags, taken out of ``options``; ``None`` without ``--cluster``.

    The number of compute threads goes with them: it is held against the cores of the machine that a replica is on.

    Raises:
        ConfigError: settings that cannot work, or Ray is missing; the message says what to change or to install.
    """
    given = {name: options.pop(name) for name in ("cluster", "replicas", "routing", "admin_key")}
    given = {name: value for name, value in given.items() if value is not None}
    if "cluster" not in given:
        if (replicas := given.get("replicas", 1)) != 1:
            check_replicas(replicas)
            raise ConfigError(
                f"--replicas {replicas} needs --cluster ray, which runs them as processes of this machine or of others"
            )
        if "routing" in given:
            raise ConfigError("--routing chooses between replicas, and needs --cluster ray")
        if "admin_key" in given and not _from_environment("admin_key"):
            raise ConfigError("--admin-key opens POST /scale, which is there with --cluster ray only; leave it out")
        return None
    if options.get("cpu_threads_bind") is not None:
        raise ConfigError(
            "--cpu-threads-bind is for one engine: replicas would be bound to the same cores; leave it out"
        )
    config = ClusterConfig(num_threads=options.pop("num_threads"), **given)
    options["num_threads"] = None
    from chairlift.cluster.nodes import check_installed

    check_installed()
    return config


def _from_environment(name: str) -> bool:
    """Whether an option's value is the environment's, which may be meant for another server."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT
