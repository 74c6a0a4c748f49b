"""One rank of a group on the device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from simulated.device import Device, Site
from simulated.group import Group
from simulated.memory import Memory
from zero.comm import Comm
from zero.comm.link import Link, Transports
from zero.comm.order import Order
from zero.comm.process_group import Overlapping
from zero.comm.transport import Local, Transport
from zero.features import offload
from zero.features.streams import Streams
from zero.plan.transport import Rehearsal
from zero.shards import masters
from zero.shards.shard_group import ShardGroup

_tensor = torch.tensor


class SimulatedLink(Link):
    """What hosts compare passes among them; what is on the device goes by the group that is not there."""

    def __init__(self, simulated: Simulated, rank: int, world: int) -> None:
        self.simulated, self.rank, self.world, self.order = simulated, rank, world, Order(rank, world)
        self._checks = Rehearsal(self.order, rank, world, "gloo")
        groups = [
            Group(simulated.device, simulated.memory, world, simulated.transfer, own_stream=simulated.own_stream)
            for _ in range(2)
        ]
        where = self.order, groups[0], rank, world
        overlapping = Overlapping(
            *where,
            blocks=False,
            checks=self._checks,
            name="nccl",
            reduces_by=groups[1],
            abort=lambda: simulated.aborted.append(1),
        )

        self.transports = Transports(lambda kind: Local() if world == 1 else overlapping)

    @property
    def on_host(self) -> Transport:
        return Local() if self.world == 1 else self._checks

    def without_backend(self, devices: object) -> str | None:
        return None

    def joined(self, across: Link) -> Link:
        rank, world = self.rank * across.world + across.rank, self.world * across.world
        return SimulatedLink(self.simulated, rank, world)


@dataclass(frozen=True)
class Simulated:
    """transfer, own_stream: as of Group. aborted: one for each group whose transfers were ended."""

    device: Device
    memory: Memory
    transfer: Callable[[int], float]
    own_stream: bool
    aborted: list[int]

    def comm(self, rank: int, world: int) -> Comm:
        """One rank of a group of its own."""
        return Comm(SimulatedLink(self, rank, world))


@contextmanager
def simulated(
    *,
    removed: Site | None = None,
    own_stream: bool = False,
    compute: Callable[[Any, Sequence[Any]], float] = lambda *_: 0.0,
    transfer: Callable[[int], float] = lambda _: 0.0,
) -> Iterator[Simulated]:
    """In here tensors are taken to be on the device, but for what is offloaded to the CPU.

    removed: the site at which nothing waits.
    """
    device = Device()
    device.removed = removed
    memory = Memory(device, compute)
    with mock.patch("torch.get_device_module", return_value=device):
        streams = Streams(torch.device("cuda:0"))
    with ExitStack() as stack:
        of_all = mock.patch("zero.shards.shard_group.streams_of", lambda _: streams)  # noqa: PT008 - a mock keeps the tensor
        stack.enter_context(of_all)
        _tell_devices_apart(device, memory, stack)
        stack.enter_context(memory.watching())
        yield Simulated(device, memory, transfer, own_stream, [])


def _tell_devices_apart(device: Device, memory: Memory, stack: ExitStack) -> None:
    """By where `memory` has noted them to be: all tensors are on one device here."""
    place, refresh, to_host = offload.CPUOffload.place, masters.refresh, Streams.to_host
    buffer, on_host = Streams.host_buffer, memory.is_in_host_memory

    def host_waits() -> None:
        device.host.join(device.current_stream().clock)

    def placed(home: offload.CPUOffload, shard: Tensor) -> Tensor:
        there = place(home, shard)
        memory.in_host_memory(there)
        host_waits()
        return there

    def refreshed(group: ShardGroup) -> None:
        refresh(group)
        host_waits()  # for copies of the parameters

    def to_host_memory(streams: Streams, source: Tensor, to: Tensor) -> None:
        memory.in_host_memory(to)
        to_host(streams, source, to)

    def host_buffer(*args: Any, **kwargs: Any) -> Tensor:
        made = buffer(*args, **kwargs)
        memory.in_host_memory(made)
        return made

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        made = _tensor(*args, **kwargs)
        if kwargs.get("device") == "cpu":
            memory.in_host_memory(made)
        return made

    for module in ("zero.shards.shard_group", "zero.features.streams", "zero.features.offload.norms"):
        stack.enter_context(mock.patch(f"{module}.apart", lambda one, other: on_host(one) != on_host(other)))
    stack.enter_context(mock.patch.object(offload.CPUOffload, "place", placed))
    stack.enter_context(mock.patch.object(offload.CPUOffload, "has", lambda home, shard: on_host(shard)))
    stack.enter_context(mock.patch.object(masters, "refresh", refreshed))
    stack.enter_context(mock.patch.object(Streams, "to_host", to_host_memory))
    stack.enter_context(mock.patch.object(Streams, "host_buffer", staticmethod(host_buffer)))
    stack.enter_context(mock.patch("torch.tensor", tensor))
