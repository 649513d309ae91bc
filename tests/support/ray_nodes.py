"""A Ray cluster of several nodes on this machine, kept by a process of its own.

Ray takes over signals, warnings and the end of the process that it is imported into, which is no good for one that runs
tests. ``python ray_nodes.py`` takes a command a line: ``add`` a node, ``kill`` the last one as if its power failed; it
answers each with a line, and ends the cluster when its input ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

import psutil

CPUS_OF_A_NODE = 1


class RayNodes:
    """A head and one more node, with one CPU each."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
        self.address = ""

    def __enter__(self) -> Self:
        self.address = self._answer()
        return self

    def add(self) -> None:
        """Adds a node."""
        self._ask("add")

    def kill(self) -> None:
        """Kills all processes of the node that was added last, replicas and their engines among them."""
        self._ask("kill")

    def processes(self) -> list[psutil.Process]:
        """All that belong to the cluster."""
        return psutil.Process(self._keeper.pid).children(recursive=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        processes = self.processes()
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(60)
        finally:
            self._keeper.kill()
            self._keeper.wait()
            self._keeper.stdout.close()
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            process.kill()
        assert not alive, alive

    def _ask(self, command: str) -> None:
        assert self._keeper.stdin is not None
        print(command, file=self._keeper.stdin, flush=True)
        assert self._answer() == command

    def _answer(self) -> str:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError("the keeper of the Ray cluster ended")


def keep() -> None:
    """Keeps a cluster until the input ends."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS_OF_A_NODE, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=CPUS_OF_A_NODE)]
    print(f"> {cluster.address}", flush=True)
    for command in map(str.strip, sys.stdin):
        if command == "add":
            nodes.append(cluster.add_node(num_cpus=CPUS_OF_A_NODE))
        elif command == "kill":
            node = nodes.pop()
            raylets = [info.process.pid for infos in node.all_processes.values() for info in infos]
            for pid in raylets:
                for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                    os.kill(process.pid, signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
        print(f"> {command}", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    keep()
