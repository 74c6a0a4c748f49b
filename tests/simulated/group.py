"""A process group of NCCL's among ranks that do all the same as this one.

Told to be asynchronous, a collective runs on a stream of the group's own, after what the current one was given, and
`wait` has the current stream wait; otherwise it runs on the current one and returns None (torch 2.8). Nothing keeps the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulated.device import Device, Event
from simulated.memory import Memory


class Work:
    def __init__(self, device: Device, end: Event) -> None:
        self._device, self._end = device, end

    def wait(self, timeout: object = None) -> None:
        if self._device.waits_here():
            self._device.current_stream().wait(self._end)


class Group:
    """seconds: what moving so many bytes takes. own_stream: it is asynchronous whatever it is told, as Gloo's is."""

    def __init__(
        self, device: Device, memory: Memory, world: int, seconds: Callable[[int], float], *, own_stream: bool = False
    ) -> None:
        self._own_stream = own_stream
        self._device, self._memory, self._world, self._seconds = device, memory, world, seconds
        self._own = device.Stream()
        self._free_at = 0.0
        self.launched: list[str] = []

    def _run(
        self, what: str, reads: list[Tensor], writes: list[Tensor], how: Any, values: Callable[[], Any]
    ) -> Work | None:
        beside = how.asyncOp or self._own_stream
        stream = self._own if beside else self._device.current_stream()
        if beside:
            stream.wait(Event(self._device.current_stream()))
        stream.time = max(stream.time, self._free_at)  # one after another in a communicator
        largest = max(tensor.nbytes for tensor in (*reads, *writes))
        label = f"{what} {len(self.launched)}"
        self.launched.append(label)
        with self._device.stream(stream):
            self._memory.access(what, reads, writes, self._seconds(largest), label)
            with self._memory.paused():
                values()
        self._free_at = stream.time
        return None if not beside else Work(self._device, Event(stream))

    def _allgather_base(self, into: Tensor, tensor: Tensor, how: Any) -> Work | None:
        return self._run(
            "gather", [tensor], [into], how, lambda: into.view(self._world, -1).copy_(tensor.clone().view(1, -1))
        )

    def _reduce_scatter_base(self, into: Tensor, tensor: Tensor, how: Any) -> Work | None:
        return self._run("reduce", [tensor], [into], how, lambda: into.copy_(tensor[: into.numel()].clone()))

    def alltoall_base(self, into: Tensor, tensor: Tensor, counts_in: Any, counts_out: Any, how: Any) -> Work | None:
        return self._run("reduce", [tensor], [into], how, into.zero_)

    def allreduce(self, tensors: list[Tensor], how: Any) -> Work | None:
        """Others have used every parameter. What lies in the CPU's memory goes among the hosts."""
        if all(map(self._memory.is_in_host_memory, tensors)):
            with self._memory.paused():
                tensors[0].copy_(tensors[0].clamp(min=1) if tensors[0].dtype == torch.uint8 else tensors[0])
            return Work(self._device, Event(self._device.current_stream()))
        return self._run("all-reduce", tensors, tensors, how, lambda: None)

    def broadcast(self, tensors: list[Tensor], how: Any) -> Work | None:
        return self._run("broadcast", tensors, tensors, how, lambda: tensors[0].fill_(0.01))
