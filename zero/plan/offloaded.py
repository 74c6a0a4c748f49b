"""Where offloaded shards lie while a step is rehearsed, and when memory of transfers is free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zero.comm import Comm, Work
from zero.comm.streams import HostStreams
from zero.plan.transport import RehearsedWork
from zero.shards.offload import Offload

# The device that stands for the host's memory, to which offload moves shards. It is never the model's own device, and
# torch can copy to and from it in a rehearsal.
_HOST = "meta"


class Offloaded(Offload):
    """Shards are on the host, and only what is on the model's device is counted."""

    active = True

    def __init__(self, offload: Any) -> None:
        """offload: what zero.CPUOffload or DiskOffload stands for."""
        self._offload = offload

    def of_groups(self, numels: Sequence[int]) -> list[Offload]:
        return [self if offload.active else offload for offload in self._offload.of_groups(numels)]

    def place(self, shard: Tensor) -> Tensor:
        return shard.to(_HOST)

    def has(self, shard: Tensor) -> bool:
        return on_host(shard)

    def at_once(self) -> int:
        """Returns how many elements of a group are stepped at a time."""
        return int(self._offload.at_once())


class BesideComputing(HostStreams):
    """The streams of a GPU: the result of a transfer is there once it is launched, and what it reads is kept until it
    is waited for."""

    def arriving(self, transfer: Work, comm: Comm, keeps: object) -> Work:
        result = transfer.wait()
        return RehearsedWork(partial(lambda kept: result, keeps))


def on_host(tensor: Tensor) -> bool:
    """Whether offload has moved the tensor to the host."""
    return tensor.device.type == _HOST
