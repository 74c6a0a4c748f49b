"""One rank of a group on the device that is not there.

This is all that is put in the place of something: `Elsewhere` and Device stand for torch.cuda, SimulatedLink for the
process group, and of zero's own, what it keeps of a device from one run to the next is kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from simulated.device import Device, Site
from simulated.group import Cost, Group
from simulated.memory import Memory
from simulated.network import Wire
from zero._torch.process_groups import abort
from zero.comm import Comm
from zero.comm.link import Link, Transports
from zero.comm.oplog import Log
from zero.comm.transport import Local, Overlapping, Work, levels
from zero.plan.rehearsal import Unsent as Rehearsal

_make_wrapper_subclass, _frombuffer = Tensor._make_wrapper_subclass, torch.frombuffer

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Hosts(Rehearsal):
    """What hosts compare. Each time they wait for as many hops as Gloo's rings have. `compared`: how often they did."""

    def __init__(self, device: Device, rank: int, world: int, hop: float) -> None:
        super().__init__(rank, world, "gloo")
        self._device, self._seconds, self.compared = device, hop * sum(len(level) - 1 for level in levels(0, world)), 0

    def _meet(self) -> None:
        self._device.host.time += self._seconds

    def compare(self, channel: int, *, flags: int = 0) -> int:
        self._meet()
        self.compared += 1
        return super().compare(channel, flags=flags)

    def all_reduce(self, tensor: Tensor, channel: int, times: float, *, maximum: bool) -> Work:
        self._meet()
        return super().all_reduce(tensor, channel, times, maximum=maximum)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._meet()
        return super().all_gather_bytes(data)


class SimulatedLink(Link):
    """What hosts compare passes among them; what is on the device goes by the group that is not there."""

    def __init__(self, simulated: Simulated, rank: int, world: int, transfer: Cost, *, one_host: bool) -> None:
        self.transfer, self.one_host = transfer, one_host
        self.simulated, self.rank, self.world, self.log = simulated, rank, world, Log(rank, world)
        self.hosts = checks = Hosts(simulated.device, rank, world, simulated.hop)
        overlapping = Overlapping(
            *(self.log, simulated.group(rank, world, transfer), rank, world),
            blocks=False,
            checks=checks,
            name="nccl",
            one_host=one_host,
            abort=lambda groups: abort(groups, GPU),
        )
        of = {"cpu": checks}
        self.transports = Transports(lambda kind: Local() if world == 1 else of.get(kind, overlapping))

    def without_backend(self, devices: object) -> str | None:
        return None

    def overlaps(self, device: torch.device) -> bool:
        return self.world > 1 and device.type != "cpu"


class Elsewhere(TorchFunctionMode):
    """All tensors lie on the CPU. Here they say that they lie where `memory` has noted them to be, and what is moved
    or made elsewhere is noted there."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args)
        if func == Tensor.device.__get__:
            return self._place(args[0])
        if func == Tensor.data.__set__ and self._place(args[0]) != self._place(args[1]):
            self._forget_graph(args[0])
        if func is Tensor.is_pinned:
            return self._memory.is_in_host_memory(args[0])
        if func is Tensor.to:
            target = kwargs.pop("device", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor):
                return self._moved(args[0], self._place(target), target.dtype, **kwargs)
            if isinstance(target, (torch.device, str)):
                return self._moved(args[0], torch.device(target), *args[2:3], **kwargs)
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        on_cpu = torch.device(kwargs["device"]) == CPU
        if not on_cpu and torch.device(kwargs["device"]) != GPU:
            return func(*args, **kwargs)
        with self._memory.made_for_host(on_cpu):
            return func(*args, **{**kwargs, "device": "cpu", **({"pin_memory": False} if on_cpu else {})})

    def _backward(self, loss: Tensor) -> None:
        """Without torch's own entry, which would keep this from what hooks do."""
        with self:
            torch.autograd.graph._engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _forget_graph(self, param: Tensor) -> None:
        """As torch does where a parameter is given data on another device."""
        with self._memory.paused():
            param.data = torch.empty(0, dtype=torch.complex64)

    def _place(self, tensor: Tensor) -> torch.device:
        if tensor.device != CPU or type(tensor) not in (Tensor, nn.Parameter):
            return GPU if tensor.device == CPU else tensor.device
        return CPU if self._memory.is_in_host_memory(tensor) else GPU

    def _moved(
        self, tensor: Tensor, target: torch.device, dtype: Any = None, *, copy: bool = False, **options: Any
    ) -> Tensor:
        dtype = dtype or tensor.dtype
        if target not in (CPU, GPU) or self._place(tensor) == target:
            return tensor.to(dtype, copy=copy)
        with self._memory.made_for_host(target == CPU):
            made = torch.empty_like(tensor, dtype=dtype)
        return made.copy_(tensor, **options)


@dataclass(frozen=True)
class Simulated:
    """transfer, wire, own_stream: as of Group. hop: as of `simulated`."""

    device: Device
    memory: Memory
    transfer: Cost
    wire: Wire | None
    own_stream: bool
    hop: float

    def launched(self) -> list[str]:
        return [transfer.kind for transfer in self.device.transfers]

    def comm(self, rank: int, world: int, transfer: Cost | None = None, *, one_host: bool = True) -> Comm:
        """One rank of a group of its own."""
        return Comm(SimulatedLink(self, rank, world, transfer or self.transfer, one_host=one_host))

    def group(self, rank: int, world: int, transfer: Cost) -> Group:
        how: Any = {"wire": self.wire, "own_stream": self.own_stream}
        return Group(self.device, self.memory, rank, world, transfer, **how)


@contextmanager
def simulated(
    *,
    removed: Site | None = None,
    own_stream: bool = False,
    compute: Callable[[Any, Sequence[Any]], float] = lambda *_: 0.0,
    bandwidth: float = inf,
    transfer: Cost = lambda *_: 0.0,
    wire: Wire | None = None,
    hop: float = 0.0,
) -> Iterator[Simulated]:
    """In here tensors are taken to be on the device, but for what is offloaded to the CPU.

    removed: the site at which nothing waits. compute, bandwidth: of Memory. transfer, wire: of Group. hop: seconds that
    a message from one host to the next takes.
    """
    device = Device()
    device.removed = removed
    memory = Memory(device, compute, bandwidth)

    def wrapping(*args: Any, device: object = None, **how: Any) -> Any:
        return _make_wrapper_subclass(*args, **how, device=CPU)

    def from_buffer(*args: Any, **how: Any) -> Tensor:
        with memory.made_for_host(True):
            made = _frombuffer(*args, **how)
            memory.lies_in_pages(made)
        return made

    def by_place(lists: Sequence[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
        """Optimizers step at once what is on one device."""
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(lists[0]):
            places.setdefault((tensor.device, tensor.dtype), []).append(place)
        return {key: ([[one[n] for n in own] if one else [] for one in lists], own) for key, own in places.items()}

    with (
        mock.patch.dict("zero.comm.streams._by_device", clear=True),
        mock.patch("torch.get_device_module", return_value=device),
        mock.patch("torch.cuda.is_current_stream_capturing", device.is_current_stream_capturing),
        mock.patch("torch.frombuffer", from_buffer),
        mock.patch.object(Tensor, "_make_wrapper_subclass", wrapping),
        mock.patch.object(Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(by_place)),
        memory.watching(),
        Elsewhere(memory),
    ):
        yield Simulated(device, memory, transfer, wire, own_stream, hop)


@contextmanager
def small_pieces(numel: int) -> Iterator[None]:
    """Offloaded shards are stepped, rounded and sent so many elements at a time."""
    with (
        mock.patch("zero.comm.streams._PIECE", numel),
        mock.patch.multiple("zero.offload.on_host", _OF_A_THREAD=numel, _LEAST=numel),
    ):
        yield


@contextmanager
def pinning(there: Simulated | None = None) -> Iterator[mock.Mock]:
    """CUDA's runtime, which pins everything. there: has what it gives back checked."""
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 0
    if there is not None:
        runtime.cudaHostRegister.side_effect = there.memory.pin
        runtime.cudaHostUnregister.side_effect = there.memory.give_back
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.cudart", return_value=runtime),
    ):
        yield runtime
