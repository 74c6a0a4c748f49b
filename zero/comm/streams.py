"""The streams of a device on which transfers run beside the computing, and the order between them.

    computing   torch's current stream: forward, backward, the optimizer, and all other transfers
    gathers     all-gathers, with the allocation of full buffers and copies of shards from the memory of the CPU
    reductions  sums of gradients, and their copies to the memory of the CPU
    averages    sums over replicas of what reductions have summed: the next reduction need not wait for them

A transfer is launched and completed on its stream; `wait` of its work makes the computing stream wait for the
transfer. Events on the device do this: the host waits only before it reads or writes memory itself (`synchronize`).
Backends of torch (2.8) run operations with asyncOp=False on the current stream.

Memory belongs to the stream that allocated it. That stream may use it again as soon as the host has dropped it:

    full buffers  gathers      this stream waits, when a buffer is released, for the computing that used it
    messages      computing    they are kept until the computing stream waits for the transfer
    sums          reductions   this stream waits, before it allocates them, for all computing so far

So only gradients that are copied to the memory of the CPU need `record_stream`, as whoever computed them may drop them,
and shards that were allocated on another stream than that of the step. It frees memory only once the host has found
that the device no longer uses it.

The CPU has no streams: there everything runs where it is launched.
"""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.streams import current_stream_of
from zero._torch.tensors import has_values
from zero.comm.comm import Comm
from zero.comm.transport import Work

# -------------------------------------------------------------------------------------------------------- pinned memory
#
# Pinned memory of exact size. torch's own allocator takes the next power of two.


# Bytes from which a copy gets memory of exact size. Pinning takes the system longer than torch's allocator needs.
_EXACT = 2**20

# Memory for copies, by what it is kept for.
_kept = WeakIdKeyDictionary()


def pinned_for(owner: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `pinned`, from 1 MiB on in memory that is used again, and is kept as long as `owner`. Less is torch's own."""
    if prod(shape) * dtype.itemsize < _EXACT:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    memory: PinnedMemory = _kept.setdefault(owner, PinnedMemory())
    return memory.empty(shape, dtype)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor in pinned memory of the CPU, with memory for as many bytes as it has, in whole pages."""
    return PinnedMemory().empty(shape, dtype)


class PinnedMemory:
    """Tensors in pinned memory, which is used again once a tensor has been freed, and given back with this object.

    On other devices than CUDA's, and other systems than Linux, memory is torch's own.
    """

    def __init__(self) -> None:
        # By the number of bytes.
        self._free: dict[int, list[memoryview]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor without values. Raises RuntimeError if the system does not pin so much memory."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes or not torch.cuda.is_available() or sys.platform != "linux":
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.accelerator.is_available())
        free = self._free[nbytes]
        pages = free.pop() if free else _pin(nbytes)
        view = memoryview(pages)  # another, which the tensor holds
        finalize(view, free.append, pages)
        return torch.frombuffer(view, dtype=dtype).view(*shape)


def _pin(nbytes: int) -> memoryview:
    """Returns memory that is pinned as long as this very view of it exists."""
    pages, runtime = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), torch.cuda.cudart()
    # A process that is forked has none of them, as of CUDA's own, so that the device and this process never have
    # different copies of a page.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # where the system has no huge pages, which are quicker to touch and to pin
        pages.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    error = runtime.cudaHostRegister(address, nbytes, 0)
    if int(error):
        raise RuntimeError(
            f"{nbytes} bytes of memory of the CPU could not be pinned: {error}. The limit of locked memory (ulimit -l) "
            "may be too low. Raise it, or pass CPUOffload(pin_memory=False)."
        )
    view = memoryview(pages)
    finalize(view, _unpin, runtime, address, pages)
    return view


def _unpin(runtime: Any, address: int, pages: mmap.mmap) -> None:
    """Before the pages are unmapped: they go with this call's arguments."""
    runtime.cudaHostUnregister(address)


# -------------------------------------------------------------------------------------------------------------- streams


# Elements that are rounded and sent at a time: they stay in the processor's cache in between.
_PIECE = 2**20


class StepGraph:
    """`recorded`: whether zero.graphed records a whole step as a CUDA graph now, of which transfers are then part. Of
    the process: autograd's threads record, too."""

    recorded = False

    def __enter__(self) -> None:
        self.recorded = True

    def __exit__(self, *_: object) -> None:
        self.recorded = False


STEP_GRAPH = StepGraph()


class Done:
    """In the place of an event after copies that were synchronous."""

    def synchronize(self) -> None: ...


DONE = Done()
_HERE = nullcontext()


class HostStreams:
    """The interface, and the answers for devices without streams, such as the CPU."""

    def gathers(self, *, ahead: bool, from_host: bool) -> AbstractContextManager[Any]:
        """Returns a context to launch an all-gather beside the computing; see `arriving`.

        from_host: it reads the memory of the CPU. ahead: it does not wait for the computing since `begin`, only for the
        uses of released buffers.
        """
        return _HERE

    def reductions(self) -> AbstractContextManager[Any]:
        """Returns a context to launch a reduction of tensors computed so far beside the computing; see `arriving`."""
        return _HERE

    def averages(self) -> AbstractContextManager[Any]:
        """Returns a context within `reductions`, for an average of what a reduction has summed."""
        return _HERE

    def arriving(self, transfer: Work, comm: Comm, keeps: object) -> Work:
        """Within such a context returns the work of what was launched, whose `wait` makes the computing stream wait.
        keeps: tensors to keep alive until then."""
        return transfer

    def copy_like(self, source: Tensor, like: Tensor) -> Tensor:
        """Returns `source` on the device of `like`, in the narrower dtype of both. A copy to the CPU is complete only
        after the host has waited for `copy_event`, or has called `synchronize`."""
        return source.to(like.device, like.dtype)

    def send(self, source: Tensor, to: Tensor) -> None:
        """Copies a tensor in the memory of the CPU to one on the device, in its dtype. `source` must not change before
        `synchronize`."""
        to.copy_(source)

    def copy_event(self) -> Any:
        """Returns an event after all copies to the CPU so far."""
        return DONE

    def begin(self) -> None:
        """Marks the start of a forward or backward. Its all-gathers `ahead` wait for all computing until here."""

    def compute_here(self) -> None:
        """Makes the current stream the computing stream."""

    def expect_computing(self, what: str, of: str) -> None:
        """Raises RuntimeError if the current stream is not the one on which the forward or backward began: transfers
        are ordered with that stream only. what: the code that runs here, for the user, with {} in place of `of`."""

    def release(self) -> None:
        """Orders later all-gathers after the computing so far, which was the last use of a full buffer."""

    def drops(self, tensor: Tensor) -> None:
        """Called before memory is freed that may have been allocated on another stream, as a shard was that the user
        has wrapped there: no other tensor has that memory before the computing so far is done."""

    def synchronize(self) -> None:
        """Waits on the host until no stream reads or writes the memory of the CPU any more."""


HOST = HostStreams()


def on_other_device(first: Tensor, second: Tensor) -> bool:
    """Returns whether the tensors are on different devices."""
    return first.device != second.device


class StreamWork(Work):
    """A transfer on a stream of its own. `wait` makes the stream `launched_on`, and the current one, wait for the event
    `arrival`. comm, keeps: what refuses where a transfer has failed, and keeps what the device may use."""

    def __init__(
        self, result: Any, arrival: Any, launched_on: Any, streams: Streams, comm: Comm, keeps: object
    ) -> None:
        self._result, self._arrival, self._launched_on = result, arrival, launched_on
        self._streams, self._comm, self._keeps = streams, comm, keeps

    def wait(self) -> Any:
        self._comm.log.failure.refuse_if_broken((self._keeps, self._result))
        for waiting in {self._launched_on, self._streams.current}:
            waiting.wait_event(self._arrival)
        self._keeps = None
        return self._result


class Streams(HostStreams):
    """The streams of one device, as above."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._find = current_stream_of(device)
        # torch.mtia has streams, but not this function.
        self._is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        # Of high priority: kernels that send take few of a GPU's processors, and computing waits for what they bring.
        self._gathers, self._reductions, self._averages = (self._module.Stream(device, priority=-1) for _ in range(3))
        self._computing = self._launched_on = self.current
        # Streams that read or write the memory of the CPU.
        self._at_host: set[Any] = set()
        # Of tensors that are rounded before they are sent: the next one to use first.
        self._buffers: list[Tensor | None] = [None, None]
        # The events after the copies from these buffers, the oldest first.
        self._sent: list[Any] = []

    @property
    def current(self) -> Any:
        return self._find()

    def begin(self) -> None:
        self.compute_here()
        self._gathers.wait_stream(self._computing)

    def compute_here(self) -> None:
        self._computing = self.current

    def expect_computing(self, what: str, of: str) -> None:
        if self.current != self._computing:
            raise RuntimeError(
                f"{what.format(of)} on another stream ({self.current}) than the forward or backward that it is part "
                f"of began on ({self._computing}). Run whole steps on one stream. Code inside of a wrapped module may "
                "use other streams, if they wait for this one and this one waits for them."
            )

    def gathers(self, *, ahead: bool, from_host: bool) -> AbstractContextManager[Any]:
        self._refuse_capture()
        if not ahead:
            self._gathers.wait_stream(self.current)
        if from_host:
            self._at_host.add(self._gathers)
        return self._on(self._gathers)

    def reductions(self) -> AbstractContextManager[Any]:
        self._refuse_capture()
        self._reductions.wait_stream(self.current)
        return self._on(self._reductions)

    def averages(self) -> AbstractContextManager[Any]:
        self._averages.wait_stream(self._reductions)
        context: AbstractContextManager[Any] = self._module.stream(self._averages)
        return context

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        self._launched_on = self.current
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def arriving(self, transfer: Work, comm: Comm, keeps: object) -> Work:
        result = transfer.wait()  # on the stream of the transfer, where it sums what arrived: the host does not wait
        return StreamWork(result, self.current.record_event(), self._launched_on, self, comm, keeps)

    def copy_like(self, source: Tensor, like: Tensor) -> Tensor:
        if not on_other_device(source, like) or like.device.type != "cpu":
            return super().copy_like(source, like)
        dtype = min(like.dtype, source.dtype, key=lambda dtype: dtype.itemsize)
        if like.is_pinned():
            copy = pinned_for(like, source.shape, dtype)
        else:
            copy = torch.empty(source.shape, dtype=dtype, device="cpu")
        self.to_host(source, copy)
        return copy

    def send(self, source: Tensor, to: Tensor) -> None:
        if not on_other_device(source, to):
            super().send(source, to)
            return
        if source.dtype == to.dtype:
            to.copy_(source, non_blocking=True)
        else:  # rounded on the host, so that fewer bytes are sent
            for piece, there in zip(source.split(_PIECE), to.split(_PIECE), strict=True):
                there.copy_(self._rounded(piece, to.dtype), non_blocking=True)
                self._sent.append(self.current.record_event())
        self._at_host.add(self.current)

    def _rounded(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds a tensor into one of two buffers in the memory of the CPU, in turn."""
        if len(self._sent) == 2:
            self._sent.pop(0).synchronize()  # the last copy from this one
        first, second = self._buffers
        if first is None or first.dtype != dtype or len(first) < len(source):
            first = self.host_buffer(len(source), dtype, pinned=source.is_pinned())
        self._buffers = [second, first]
        return first[: len(source)].copy_(source)

    @staticmethod
    def host_buffer(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def to_host(self, source: Tensor, to: Tensor) -> None:
        """Launches a copy to a tensor on the CPU, after the computing so far."""
        self._reductions.wait_stream(self.current)
        source.record_stream(self._reductions)  # it may be a copy that the computing stream allocated, and dropped next
        with self._module.stream(self._reductions):
            to.copy_(source.to(to.dtype), non_blocking=True)
        self._at_host.add(self._reductions)

    def copy_event(self) -> Any:
        return self._reductions.record_event()

    def _refuse_capture(self) -> None:
        if self._is_capturing() and not STEP_GRAPH.recorded:
            raise RuntimeError(
                "a CUDA graph is being recorded that would have a part of a step alone: parameters and gradients are "
                "freed in between, and a replay would ask no rank whether it does the same. Record the whole step, by "
                "zero.graphed(step, model, optimizer)."
            )

    def release(self) -> None:
        self._gathers.wait_stream(self.current)

    def drops(self, tensor: Tensor) -> None:
        tensor.record_stream(self.current)  # does nothing where this stream has allocated it, as from the next step on

    def synchronize(self) -> None:
        for stream in self._at_host:
            stream.record_event().synchronize()
        self._at_host.clear()


_by_device: dict[torch.device, HostStreams] = {}


def streams_of(tensor: Tensor) -> HostStreams:
    """Returns the streams of the tensor's device: one object for each device."""
    device = tensor.device
    # torch.mps has no streams.
    if device.type == "cpu" or not has_values(tensor) or not hasattr(torch.get_device_module(device), "Stream"):
        return HOST
    if device not in _by_device:
        _by_device[device] = Streams(device)
    return _by_device[device]


def streams_in(streams: Iterable[HostStreams]) -> list[HostStreams]:
    """Returns each of the streams of a model's shard groups once; none where devices have none."""
    return [one for one in dict.fromkeys(streams) if one is not HOST]
