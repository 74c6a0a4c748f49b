"""Where offloaded shards lie while a step is rehearsed, and when memory of transfers is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from zero.comm import Comm, Handle
from zero.comm.streams import NoStreams
from zero.measure.kinds import ELEMENTWISE
from zero.shards.home import Home
from zero.shards.shard_group import ShardGroup

_HOST = "meta"
"""The device that stands for the host's memory, to which offload moves shards. It is never the model's own device, and
torch can copy to and from it in a rehearsal."""


class Offloaded(Home):
    """Shards are on the host, and only what is on the model's device is counted.

    Steps that overlap have ended when the next forward begins, but gathers are launched as if they had not.
    """

    apart = True

    def __init__(self, home: Any) -> None:
        """home: what zero.CPUOffload or DiskOffload stands for."""
        self._home = home
        self._beside: Sequence[ShardGroup] = ()

    def of_groups(self, numels: Sequence[int]) -> list[Home]:
        return [self if home.apart else home for home in self._home.of_groups(numels)]

    def place(self, shard: Tensor) -> Tensor:
        return shard.to(_HOST)

    def has(self, shard: Tensor) -> bool:
        return on_host(shard)

    def rounded(self, group: ShardGroup) -> Tensor | None:
        """What the thread rounds for the device, if steps overlap."""
        rounds = self._home.overlaps and isinstance(self._home, zero.CPUOffload)
        return group.stepped.to(group.full.dtype) if rounds and group.full.dtype != group.stepped.dtype else None

    def at_once(self) -> int:
        """Returns how many elements of a group are stepped at a time."""
        elements: int = self._home.at_once()
        return elements

    def before_step(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], groups: Sequence[ShardGroup], *, closure: bool
    ) -> None:
        self._beside = groups if self._home.overlaps and type(optimizer) in ELEMENTWISE else ()

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        for group in self._beside:
            group.step_beside(Handle(lambda: None), self.rounded(group))
        self._beside = ()


class BesideComputing(NoStreams):
    """The streams of a GPU: the result of a transfer is there once it is launched, and what it reads is kept until it
    is waited for."""

    def gather(
        self, comm: Comm, launch: Callable[[], Handle], *, keeps: object, ahead: bool, from_host: bool
    ) -> Handle:
        return self.reduce(comm, launch, keeps=keeps)

    def reduce(self, comm: Comm, launch: Callable[[], Handle], *, keeps: object) -> Handle:
        held = keeps, launch().wait()
        return Handle(lambda: held[1])

    def bring(self, source: Tensor, like: Tensor) -> Tensor:
        narrower = min(source.dtype, like.dtype, key=lambda dtype: dtype.itemsize)
        return source.to(narrower).to(like.device)


def on_host(tensor: Tensor) -> bool:
    """Whether offload has moved the tensor to the host."""
    return tensor.device.type == _HOST
