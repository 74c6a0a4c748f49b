"""A process group of NCCL's among ranks that do all the same as this one.

Told to be asynchronous, a collective runs on a stream of the group's own, after what the current one was given, and
`wait` has the current stream wait; otherwise it runs on the current one and returns None (torch 2.8). Nothing keeps the
host.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulated.device import Device, Event, Transfer
from simulated.memory import Memory
from simulated.network import Wire

LONGEST = 2.0
"""Seconds that an abort waits for what does not end."""

Cost = Callable[[str, int], float]
"""Seconds of a transfer of a kind, of so many bytes: as Network.seconds."""


class Work:
    def __init__(self, device: Device, end: Event) -> None:
        self._device, self._end = device, end

    def wait(self, timeout: object = None) -> None:
        if self._device.waits_here():
            self._device.current_stream().wait(self._end)


class Group:
    """own_stream: it is asynchronous whatever it is told, as Gloo's is. wire: of all groups; None: each has its own."""

    def __init__(
        self,
        device: Device,
        memory: Memory,
        rank: int,
        world: int,
        seconds: Cost,
        *,
        wire: Wire | None = None,
        own_stream: bool = False,
    ) -> None:
        self._device, self._memory, self._rank, self._world = device, memory, rank, world
        self._seconds, self._wire, self._own_stream = seconds, wire, own_stream
        self._own = device.Stream()
        self._free_at = 0.0
        self._launched, self._aborted = False, threading.Event()
        device.groups.append(self)

    def _run(
        self, what: str, reads: list[Tensor], writes: list[Tensor], how: Any, values: Callable[[], Any]
    ) -> Work | None:
        self._device.host.time += self._device.launch
        beside = how.asyncOp or self._own_stream
        stream = self._own if beside else self._device.current_stream()
        if beside:
            stream.wait(Event(self._device.current_stream()))
        stream.time = max(stream.time, self._free_at)  # one after another in a communicator
        begin = max(stream.time, self._device.host.time)
        nbytes = (writes if what in ("gather", "broadcast") else reads)[0].nbytes
        seconds = self._seconds(what, nbytes)
        if self._wire is not None:
            seconds = self._wire.send(begin, seconds) - begin
        with self._device.stream(stream):
            self._memory.access(what, reads, writes, seconds, f"{what} {len(self._device.transfers)}")
            with self._memory.paused():
                values()
        self._free_at, self._launched = stream.time, True
        self._device.transfers.append(Transfer(what, nbytes, begin, stream.time, self._world))
        return None if not beside else Work(self._device, Event(stream))

    def abort(self) -> None:
        """As NCCL's where a rank is lost: it returns when all has ended that was launched on the device, and that ends
        once the abort of its own group has begun. `aborted` of the device: whether it did."""
        self._aborted.set()
        launched = [group for group in self._device.groups if group._launched]
        self._device.aborted.append(all(group._aborted.wait(LONGEST) for group in launched))

    def _allgather_base(self, into: Tensor, tensor: Tensor, how: Any) -> Work | None:
        return self._run(
            "gather", [tensor], [into], how, lambda: into.view(self._world, -1).copy_(tensor.clone().view(1, -1))
        )

    def _reduce_scatter_base(self, into: Tensor, tensor: Tensor, how: Any) -> Work | None:
        return self._run("reduce", [tensor], [into], how, lambda: into.copy_(tensor[: into.numel()].clone()))

    def reduce(self, tensors: list[Tensor], how: Any) -> Work | None:
        return self._run("reduce", tensors, tensors, how, lambda: None)

    def alltoall_base(self, into: Tensor, tensor: Tensor, counts_in: Any, counts_out: Any, how: Any) -> Work | None:
        return self._run("all-to-all", [tensor], [into], how, into.zero_)

    def allreduce(self, tensors: list[Tensor], how: Any) -> Work | None:
        """Others have used every parameter. What lies in the CPU's memory goes among the hosts."""
        if all(map(self._memory.is_in_host_memory, tensors)):
            with self._memory.paused():
                tensors[0].copy_(tensors[0].clamp(min=1) if tensors[0].dtype == torch.uint8 else tensors[0])
            return Work(self._device, Event(self._device.current_stream()))
        return self._run("all-reduce", tensors, tensors, how, lambda: None)

    def broadcast(self, tensors: list[Tensor], how: Any) -> Work | None:
        reads = tensors if how.rootRank == self._rank else []
        return self._run("broadcast", reads, tensors, how, lambda: tensors[0].fill_(0.01))
