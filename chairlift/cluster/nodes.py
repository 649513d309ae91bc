"""Ray: connecting to a cluster, and whether its nodes have room."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.cluster.config import ClusterConfig
from chairlift.config import ConfigError, EngineConfig, available_cores
from chairlift.logs import LogConfig

Bundle = Mapping[str, float]
"""What one replica reserves on one node: numbers of CPUs and of GPUs, as Ray counts them."""
NAMESPACE = "chairlift"
OBJECT_STORE_BYTES = 100 * 1024**2
"""Of a cluster that the server starts itself. Tokens travel inside messages, so next to nothing is stored."""
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, or what a test passes off as one."""

    address: str
    resources: Mapping[str, float]

    def room(self, bundle: Bundle) -> int:
        """How many replicas fit, if nothing else is there."""
        return int(min(self.resources.get(kind, 0.0) // count for kind, count in bundle.items()))


def check_installed() -> None:
    """Raises ConfigError, which says what to install, if Ray is missing."""
    if find_spec("ray") is None:
        raise ConfigError("--cluster runs on Ray, which is not installed; run: pip install 'chairlift[cluster]'")


def connect(config: ClusterConfig, logs: LogConfig) -> str:
    """Connects this process to the cluster, and returns a word on which one that is.

    This machine has to be one of its nodes. Without an address that is the cluster of ``RAY_ADDRESS``, or the last one
    that was started on this machine; where there is none, one is started for as long as this process lives.

    Raises:
        ConfigError: there is no cluster at the address, or this machine is not part of it.
    """
    # Before Ray is imported: it reports every cluster that it starts to its makers, unless it is asked not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = config.address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        if (reason := _unreachable(address)) is not None:
            raise ConfigError(
                f"there is no Ray cluster at {address} ({reason}); start one with ray start --head, or correct the "
                "address"
            )
    else:
        address = _last_started()
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": logs.format == "text",
        "logging_level": "WARNING",
    }
    if address is None:
        ray.init(
            address="local",
            num_cpus=available_cores(),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **common,
        )
        return "a Ray cluster of this machine alone, which ends with the server"
    try:
        ray.init(address=address, **common)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {address} ({_one_line(error)}); this machine has to be one of its nodes, "
            f"if only for the server: ray start --address={address} --num-cpus=0"
        ) from error
    return f"the Ray cluster at {address}"


def _last_started() -> str | None:
    """The head of the cluster that was last started here, if it lives: where Ray looks for it too, but without trying
    for minutes to reach one that has ended without a word."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108 - Ray's, not ours
    try:
        address = file.read_text("utf-8").strip()
    except OSError:
        return None
    return address if _unreachable(address) is None else None


def nodes() -> list[Node]:
    """The nodes that live, by what Ray knows."""
    import ray

    return [Node(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def bundle_of(config: EngineConfig, num_threads: int | None, there: Sequence[Node]) -> Bundle:
    """What a replica reserves: a GPU and a core for each rank, or on the CPU a core for each thread, of which there is
    one a rank unless ``num_threads`` says how many.

    Raises:
        ConfigError: GPUs are asked for and the cluster has none.
    """
    ranks = config.tensor_parallel_size
    has_gpus = any(node.resources.get("GPU", 0) for node in there)
    if config.device == "cuda" and not has_gpus:
        raise ConfigError("--device cuda needs GPUs, and Ray knows of none in this cluster; use --device cpu")
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        return {"CPU": ranks, "GPU": ranks}
    return {"CPU": num_threads or ranks}


def check_room(bundle: Bundle, replicas: int, there: Sequence[Node]) -> None:
    """Raises ConfigError, with the arithmetic, unless the nodes have room for so many replicas."""
    rooms = [node.room(bundle) for node in there]
    if sum(rooms) >= replicas:
        return
    counts = Counter(_amount(node.resources, bundle) for node in there)
    having = "; ".join(f"{count} × {amount}" if count > 1 else amount for amount, count in counts.items())
    need = _amount(bundle, bundle)
    if not any(rooms):
        raise ConfigError(
            f"a replica takes {need} of one node, since the ranks of a model share a machine, and no node of the "
            f"cluster has so many (they have {having}); lower --tensor-parallel-size or --num-threads, or add larger "
            "nodes"
        )
    raise ConfigError(
        f"{replicas} replicas of {need} each do not fit: the cluster's nodes ({having}) have room for {sum(rooms)}; "
        "lower the number of replicas, or add nodes first"
    )


def _amount(resources: Mapping[str, float], kinds: Bundle) -> str:
    counts = ((kind, int(resources.get(kind, 0))) for kind in kinds)
    return " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts)


def _unreachable(address: str) -> str | None:
    """Why nobody listens there; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
