"""Puts a routed engine together from its settings, on a Ray cluster."""

from __future__ import annotations

import logging

from chairlift.cluster.config import ClusterConfig
from chairlift.cluster.nodes import bundle_of, check_room, connect, nodes
from chairlift.cluster.router import RoutedEngine
from chairlift.config import EngineConfig
from chairlift.logs import LogConfig

logger = logging.getLogger(__name__)


def on_cluster(config: EngineConfig, cluster: ClusterConfig, logs: LogConfig) -> RoutedEngine:
    """Connects to the cluster, and returns what will place the replicas there when it begins.

    Raises:
        ConfigError: there is no such cluster, or it has no room for them.
    """
    logger.info("running on %s", connect(cluster, logs))
    import ray

    from chairlift.cluster.placement import RayActor

    try:
        bundle = bundle_of(config, cluster.num_threads, nodes())
        check_room(bundle, cluster.replicas, nodes())
    except BaseException:
        ray.shutdown()
        raise
    num_threads = None if "GPU" in bundle else cluster.num_threads or 1
    return RoutedEngine(
        config,
        cluster,
        lambda number: RayActor(number, bundle, config, num_threads, logs),
        lambda count: check_room(bundle, count, nodes()),
        ray.shutdown,
    )
