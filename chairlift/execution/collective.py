"""Ranks on one machine that talk through ``torch.distributed``: by gloo on CPUs, by NCCL between GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from chairlift.config import ConfigError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class CommunicationError(RuntimeError):
    """What all ranks do together did not end: one of them is gone, or takes too long."""


class DistributedRanks:
    """A :class:`~chairlift.model.parallel.Communicator` over a process group, which is this process's only one.

    Args:
        rank: of this process.
        size: how many ranks there are.
        device: of this rank.

    Raises:
        ConfigError: this process is in a group already.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "this process is in a torch.distributed group already, and can be in one only: close what uses it, or "
                "run --tensor-parallel-size in a process of its own"
            )
        self.rank = rank
        self.size = size
        self._device = device
        self._group: dist.ProcessGroup | None = None

    def join(self, store: Path, seconds: float) -> None:
        """Waits until all ranks have come here.

        Args:
            store: a file, not there yet, in a directory that is the ranks' own.
            seconds: that this may take, and then each operation.

        Raises:
            CommunicationError: they did not all come.
        """
        _prefer_loopback()
        with _told_apart():
            dist.init_process_group(
                BACKENDS[self._device.type],
                init_method=f"file://{store}",
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=seconds),
                device_id=self._device if self._device.type == "cuda" else None,
            )

    def limit(self, seconds: float) -> None:
        """From now on an operation may take so long, and the store is not needed any more. All ranks do this together.

        Raises:
            CommunicationError: they did not.
        """
        with _told_apart():
            self._group = dist.new_group(timeout=timedelta(seconds=seconds))
        # None is behind here who has still to read the store.
        self.all_reduce(torch.zeros(1, device=self._device))

    def leave(self) -> None:
        """Ends the group for this rank; waits for nobody."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See :meth:`chairlift.model.parallel.Communicator.all_reduce`.

        Raises:
            CommunicationError: a rank did not take part in time.
        """
        with _told_apart():
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """See :meth:`chairlift.model.parallel.Communicator.gather`.

        Raises:
            CommunicationError: a rank did not take part in time.
        """
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with _told_apart():
            dist.gather(x, pieces, dst=0, group=self._group)
        return pieces or []


@contextmanager
def _told_apart() -> Iterator[None]:
    """A rank's own mistakes are not to be mistaken for another one's end, which torch reports as the same kind."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(str(error).splitlines()[0]) from error


def _prefer_loopback() -> None:
    """gloo listens where the host's name leads, which may be nowhere, or open to others; the ranks are all here."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
