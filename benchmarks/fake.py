"""Ranks that are not there: torch's fake process group, whose transfers here take as long as on a wire.

Each collective copies this rank's own values into what it receives, and is followed, on the stream on which it runs, by
a kernel that sleeps as long as its bytes take on the wires. On the CPU the host sleeps, so that nothing overlaps.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulated.network import Network

METHODS = {
    "gather": ("all_gather_single", "_allgather_base"),
    "gather_each": ("allgather",),
    "reduce": ("reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all": ("all_to_all_single", "alltoall_base"),
    "all_reduce": ("allreduce",),
    "broadcast": ("broadcast",),
}
"""Of process groups, by the names that versions of torch give them."""


def patched(**by: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A context in which all process groups do these of METHODS so: with the group, tensors and options."""
    known = {
        name: lambda *args, run=run: run(*args)  # a plain function is bound to the group
        for method, run in by.items()
        for name in METHODS[method]
        if hasattr(dist.ProcessGroup, name)
    }
    return mock.patch.multiple(dist.ProcessGroup, **known)


class Done(dist.Work):
    """brought: what DistributedDataParallel and its hooks ask the work's future for."""

    def __init__(self, brought: Any = None) -> None:
        super().__init__()
        self._brought = brought

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._brought)
        return future


@dataclass(frozen=True)
class Wiring:
    """bandwidth: GB/s of a link between the GPUs of one host; with gpus_a_host that of a NIC, of which a host has
    `nics` (0: one a GPU), and `link` that of links. ctas: programs of a transfer's kernel (ctas.py), 0: one thread that
    sleeps. one: transfers follow one another in the order of their launches, as in one communicator; otherwise those on
    different streams have the whole bandwidth each."""

    bandwidth: float = inf
    gpus_a_host: int = 0
    nics: int = 0
    link: float = 300.0
    ctas: int = 0
    one: bool = False

    def network(self, world: int) -> Network:
        gpus = min(self.gpus_a_host, world) or world
        link = self.bandwidth if gpus == world else self.link
        return Network(world // gpus, gpus, self.nics or gpus, 1e9 * self.bandwidth, 1e9 * link)


class Wires:
    """Stands for the network of a rank of `world`.

    `on`: whether collectives take their time. `seconds`: what those took, or were to take, so far.
    """

    def __init__(self, wiring: Wiring, world: int, device: torch.device) -> None:
        self.on, self.seconds = True, 0.0
        self._network, self._device = wiring.network(world), device
        self._sleep = time.sleep if device.type == "cpu" else _sleeping(wiring, device)
        # The event after the last transfer, for which the next one waits.
        self._last = torch.cuda.Event() if wiring.one and device.type == "cuda" else None

    def patched(self) -> AbstractContextManager[Any]:
        """A context in which process groups use these wires."""
        return patched(
            gather=partial(self._flat, "gather"),
            gather_each=self._gather_each,
            reduce=partial(self._flat, "reduce"),
            all_to_all=partial(self._flat, "all-to-all"),
            all_reduce=partial(self._in_place, "all-reduce"),
            broadcast=partial(self._in_place, "broadcast"),
        )

    def _flat(self, kind: str, group: dist.ProcessGroup, into: Tensor, tensor: Tensor, *options: Any) -> Done:
        own = tensor.view(-1)[: into.numel()].clone()  # it may lie in `into`
        copies = into.numel() // max(len(own), 1)
        into.view(-1)[: copies * len(own)].view(copies, -1).copy_(own)
        self._send(kind, into if kind == "gather" else tensor)
        return Done()

    def _gather_each(
        self, group: dist.ProcessGroup, into: list[list[Tensor]], tensors: list[Tensor], *options: Any
    ) -> Done:
        for one in into[0]:
            one.copy_(tensors[0])
        self._send("gather", tensors[0], times=len(into[0]))
        return Done()

    def _in_place(self, kind: str, group: dist.ProcessGroup, tensors: list[Tensor], *options: Any) -> Done:
        self._send(kind, tensors[0])
        return Done(tensors)

    def _send(self, kind: str, tensor: Tensor, times: int = 1) -> None:
        """kind: as of Network. tensor: of all ranks together, or a part of it that is sent so many times. On a GPU what
        ranks compare on their hosts takes no time of the wires."""
        if tensor.device.type != self._device.type:
            return
        seconds = self._network.seconds(kind, times * tensor.nbytes)
        self.seconds += seconds
        if not self.on or not seconds:
            return
        if self._last is not None:
            self._last.wait()
        self._sleep(seconds)
        if self._last is not None:
            self._last.record()


def _sleeping(wiring: Wiring, device: torch.device) -> Callable[[float], object]:
    """Launches a kernel that takes so many seconds."""
    if wiring.ctas:
        from ctas import Copies  # needs Triton

        return Copies(wiring.ctas, wiring.bandwidth, device)
    cycles = _cycles_a_second()
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles))


def _cycles_a_second() -> float:
    """Of the clock by which torch.cuda._sleep counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (10**8, 10**9):  # the first warms up
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)
