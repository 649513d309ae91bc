"""Puts a routed engine together from its settings, on a Ray cluster."""

from __future__ import annotations

import logging
from dataclasses import replace

from chairlift.cluster.config import ClusterConfig
from chairlift.cluster.nodes import bundle_of, check_room, connect, nodes
from chairlift.cluster.router import RoutedEngine
from chairlift.config import EngineConfig
from chairlift.logs import LogConfig

logger = logging.getLogger(__name__)

DEFAULT_CPU_SHARE = 0.50
"""As an engine alone takes it, of the memory that is available."""


def on_cluster(config: EngineConfig, cluster: ClusterConfig, logs: LogConfig) -> RoutedEngine:
    """Connects to the cluster, and returns what will place the replicas there when it begins.

    Raises:
        ConfigError: there is no such cluster, or it has no room for them.
    """
    logger.info("running on %s", connect(cluster, logs))
    import ray

    from chairlift.cluster.placement import RayActor

    try:
        there = nodes()
        bundle = bundle_of(config, cluster.num_threads, there)
        check_room(bundle, cluster.replicas, there)
    except BaseException:
        ray.shutdown()
        raise
    num_threads = cluster.num_threads
    if "GPU" not in bundle:
        num_threads = int(bundle["CPU"])
        config = _sharing_memory(config, -(-cluster.replicas // sum(node.room(bundle) > 0 for node in there)))
    return RoutedEngine(
        config,
        cluster,
        lambda number: RayActor(number, bundle, config, num_threads, logs),
        lambda count: check_room(bundle, count, nodes()),
        ray.shutdown,
    )


def _sharing_memory(config: EngineConfig, replicas: int) -> EngineConfig:
    """On the CPU, with the default share of memory divided by the average number of ``replicas`` per node.

    GPUs are not shared; and what the user has set is what each replica gets.
    """
    if config.gpu_memory_utilization is not None or config.kv_cache_memory_bytes is not None:
        return config
    return replace(config, gpu_memory_utilization=DEFAULT_CPU_SHARE / replicas)
