"""Where the replicas of a server run, and how many there are. Free of Ray, like everything that only reads flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from chairlift.config import ConfigError
from chairlift.scheduling.routing import ROUTES

MAX_REPLICAS = 1024
LOCAL = "ray"
"""As ``--cluster``: the cluster that runs here, or else one on this machine that ends with the server."""
_ADDRESS = re.compile(r"(?:ray://)?(?P<address>(?:\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas on a Ray cluster.

    Attributes:
        cluster: "ray", or the address of a cluster's head: ``ray://host:port`` or ``host:port``.
        replicas: how many to begin with.
        routing: which of them gets a request; one of :data:`~chairlift.scheduling.routing.ROUTES`.
        num_threads: compute threads of a replica on the CPU, shared by its ranks; ``None`` takes one for each rank.
        admin_key: opens ``POST /scale``; ``None`` leaves it shut.
    """

    cluster: str = LOCAL
    replicas: int = 1
    routing: str = "prefix-aware"
    num_threads: int | None = None
    admin_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        if self.routing not in ROUTES:
            raise ConfigError(f"--routing must be one of {', '.join(ROUTES)}; got {self.routing!r}")
        if self.cluster != LOCAL and _ADDRESS.fullmatch(self.cluster) is None:
            raise ConfigError(
                f"--cluster must be ray, or the address of a Ray cluster's head as ray://host:port (Ray's own port is "
                f"6379); got {self.cluster!r}"
            )
        if self.admin_key is not None and not self.admin_key:
            raise ConfigError("--admin-key must not be empty: it would let everybody in")

    @property
    def address(self) -> str | None:
        """``host:port`` of the cluster's head, or ``None`` for one that is found or started here."""
        match = _ADDRESS.fullmatch(self.cluster)
        return None if match is None else match["address"]


def check_replicas(count: int, flag: str = "--replicas") -> None:
    """Raises ConfigError unless there can be so many replicas."""
    if not 1 <= count <= MAX_REPLICAS:
        raise ConfigError(f"{flag} must be from 1 to {MAX_REPLICAS}, got {count}")
