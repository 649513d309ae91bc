"""Which clusters and sizes are refused, and with what reason. No Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from chairlift.cli.serve import serve
from chairlift.cluster import nodes
from chairlift.cluster.config import ClusterConfig
from chairlift.cluster.nodes import Node, bundle_of, check_room
from chairlift.config import ConfigError, EngineConfig

NODES = [Node("10.0.0.1", {"CPU": 4.0, "memory": 1e9}), Node("10.0.0.2", {"CPU": 4.0}), Node("10.0.0.3", {"CPU": 2.0})]
GPU_NODES = [Node("10.0.0.1", {"CPU": 8.0, "GPU": 2.0}), Node("10.0.0.2", {"CPU": 8.0})]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--replicas", "2"), "--replicas 2 needs --cluster ray"),
        (("--replicas", "0"), "--replicas must be from 1 to 1024, got 0"),
        (("--replicas", "-1", "--cluster", "ray"), "--replicas must be from 1 to 1024, got -1"),
        (("--routing", "least-load"), "--routing chooses between replicas, and needs --cluster ray"),
        (("--admin-key", "x"), "--admin-key opens POST /scale, which is there with --cluster ray only; leave it out"),
        (("--cluster", "ray", "--admin-key", ""), "--admin-key must not be empty"),
        (("--cluster", "10.0.0.1"), "--cluster must be ray, or the address"),
        (("--cluster", "ray://"), "--cluster must be ray, or the address"),
        (("--cluster", "http://10.0.0.1:6379"), "--cluster must be ray, or the address"),
    ],
)
def test_flags_that_cannot_work_are_refused(arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("chairlift.cli.serve.run_server", lambda *_: None)
    result = CliRunner().invoke(serve, arguments)
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)


def test_an_admin_key_of_the_environment_may_be_another_servers(monkeypatch: pytest.MonkeyPatch):
    started: list[ClusterConfig | None] = []
    monkeypatch.setattr("chairlift.cli.serve.run_server", lambda *arguments: started.append(arguments[-1]))
    environment = {"CHAIRLIFT_ADMIN_KEY": "x"}
    result = CliRunner().invoke(serve, [], env=environment)
    assert result.exception is None, result.exception
    assert started == [None]
    result = CliRunner().invoke(serve, ["--admin-key", "x"], env=environment)
    assert isinstance(result.exception, ConfigError), "the flag is meant for this one, whatever the environment has"
    monkeypatch.setattr(nodes, "check_installed", lambda: None)
    result = CliRunner().invoke(serve, ["--cluster", "ray"], env=environment)
    assert result.exception is None, result.exception
    assert started == [None, ClusterConfig(cluster="ray", admin_key="x")]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "find_spec", lambda name: None)
    result = CliRunner().invoke(serve, ["--cluster", "ray"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'chairlift[cluster]'" in str(result.exception)


@pytest.mark.parametrize("form", ["ray://10.0.0.1:6379", "10.0.0.1:6379"])
def test_addresses(form: str):
    assert ClusterConfig(cluster=form).address == "10.0.0.1:6379"
    assert ClusterConfig(cluster="ray://[::1]:6379").address == "[::1]:6379"
    assert ClusterConfig().address is None


def test_an_admin_key_is_not_shown():
    assert "secret" not in repr(ClusterConfig(admin_key="secret"))


def test_nobody_at_the_address():
    command = ("serve", "smollm2", "--cluster", "127.0.0.1:1", "--port", "0")
    result = subprocess.run([sys.executable, "-m", "chairlift", *command], capture_output=True, text=True)
    assert result.returncode == 1
    assert "there is no Ray cluster at 127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_replica_reserves_what_its_ranks_compute_on():
    assert bundle_of(EngineConfig(), None, NODES) == {"CPU": 1}
    assert bundle_of(EngineConfig(), 3, NODES) == {"CPU": 3}
    assert bundle_of(EngineConfig(), None, GPU_NODES) == {"CPU": 1, "GPU": 1}
    assert bundle_of(EngineConfig(device="cpu"), 2, GPU_NODES) == {"CPU": 2}
    with pytest.raises(ConfigError, match="--device cuda needs GPUs"):
        bundle_of(EngineConfig(device="cuda"), None, NODES)


@pytest.mark.parametrize(
    ("bundle", "replicas", "there", "reason"),
    [
        ({"CPU": 1}, 10, NODES, None),
        ({"CPU": 1}, 11, NODES, r"11 replicas of 1 CPU each do not fit: the cluster's nodes \(2 × 4 CPUs; 2 CPUs\) "
                                "have room for 10"),
        ({"CPU": 3}, 2, NODES, None),
        ({"CPU": 3}, 3, NODES, "have room for 2"),
        ({"CPU": 5}, 1, NODES, "a replica takes 5 CPUs of one node, since the ranks of a model share a machine"),
        ({"CPU": 1, "GPU": 1}, 2, GPU_NODES, None),
        ({"CPU": 1, "GPU": 1}, 3, GPU_NODES, "have room for 2"),
        ({"CPU": 4, "GPU": 4}, 1, GPU_NODES, "a replica takes 4 CPUs and 4 GPUs of one node"),
        ({"CPU": 1}, 1, [], "no node of the cluster has so many"),
    ],
)  # fmt: skip
def test_room_is_counted_by_node(bundle: dict[str, float], replicas: int, there: list[Node], reason: str | None):
    if reason is None:
        check_room(bundle, replicas, there)
    else:
        with pytest.raises(ConfigError, match=reason):
            check_room(bundle, replicas, there)
