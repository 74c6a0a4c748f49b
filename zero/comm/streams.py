"""What runs beside the computing of a GPU, and what is ordered after what.

    computing   torch's current stream: forward, backward, the optimizer, and what else is sent
    gathers     all-gathers, with all that makes full buffers: room for them, shards from the memory of the CPU
    reductions  sums of gradients, and what of them goes to the memory of the CPU

A transfer is launched and completed on its stream; `wait` of its handle has the computing stream run what it is given
next after the transfer. Events on the device order all this: the host waits only for what it is to read or write itself
(`settle`). Backends of torch launch what is not to be waited for asynchronously on the current stream (torch 2.8).

Memory belongs to the stream that it was allocated on, which may use it for something else once the host has dropped it:

    full buffers  gathers      which wait, where one is released, for what was computed with it
    what is sent  computing    kept until that waits for the transfer
    sums          reductions   which wait, before they allocate, for what was computed until then

So nothing needs `record_stream`, by which memory would be free only when the host finds the device to be done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zero._torch import has_values
from zero.comm.comm import Comm
from zero.comm.handle import Handle


class Beside(Protocol):
    """What is called, within a context of a stream, with the handle of what was launched there."""

    def __call__(self, launched: Handle, *, keeps: object = None) -> Handle:
        """The handle that what is computed waits by. keeps: what was sent, which is not freed until then."""


def _in_place(launched: Handle, *, keeps: object = None) -> Handle:
    return launched


_IN_PLACE = nullcontext(_in_place)


class NoStreams:
    """Of devices that have none, such as the CPU: everything runs where it is launched."""

    def gathers(self, comm: Comm, *, ahead: bool, from_host: bool) -> AbstractContextManager[Beside]:
        """A context in which an all-gather is launched beside the computing.

        ahead: it need not wait for what was computed since `begin`, but for what was done with buffers until they were
            released. from_host: it reads the memory of the CPU.
        """
        return _IN_PLACE

    def reductions(self, comm: Comm) -> AbstractContextManager[Beside]:
        """A context in which a reduction of what was computed so far is launched beside the computing."""
        return _IN_PLACE

    def bring(self, source: Tensor, like: Tensor) -> Tensor:
        """In the dtype of `like`, where that lies. To the CPU it is on its way until the host has waited for
        `departure`, or has called `settle`."""
        return source.to(like.device, like.dtype)

    def departure(self) -> Any:
        """An event after all that was brought to the CPU so far; None where nothing is on its way."""
        return None

    def release(self) -> None:
        """A full buffer is dropped: what was computed so far was the last that reads or writes it."""

    def settle(self) -> None:
        """The host waits until nothing reads or writes the memory of the CPU any more."""


class Streams(NoStreams):
    """Those of one device. See `streams_of`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._records: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._gathers, self._reductions = (self._module.Stream(device, priority=-1) for _ in range(2))
        self._computing = self._current
        self._at_host: set[Any] = set()
        """Streams that read or write the memory of the CPU."""

    @property
    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def begin(self) -> None:
        """A forward or backward begins. What it gathers ahead was written before."""
        self.compute_here()
        self._gathers.wait_stream(self._computing)

    def compute_here(self) -> None:
        """The current stream is the one that `expect_computing` expects from here on."""
        self._computing = self._current

    def expect_computing(self, what: str) -> None:
        """Raises RuntimeError where the current stream is not the one on which the forward or backward began: what is
        sent is ordered with that one only. what: it runs here, in words for the user."""
        if self._current != self._computing:
            raise RuntimeError(
                f"{what} on another stream ({self._current}) than the forward or backward that it is part of began on "
                f"({self._computing}). Run whole steps on one stream; inside of a wrapped module others may be used, "
                "if they wait for this one and this one waits for them."
            )

    @contextmanager
    def gathers(self, comm: Comm, *, ahead: bool, from_host: bool) -> Iterator[Beside]:
        self._refuse_recording()
        if not ahead:
            self._gathers.wait_stream(self._current)
        if from_host:
            self._at_host.add(self._gathers)
        with self._on(self._gathers, comm) as beside:
            yield beside

    @contextmanager
    def reductions(self, comm: Comm) -> Iterator[Beside]:
        self._refuse_recording()
        self._reductions.wait_stream(self._current)
        with self._on(self._reductions, comm) as beside:
            yield beside

    @contextmanager
    def _on(self, stream: Any, comm: Comm) -> Iterator[Beside]:
        launched_on = self._current

        def beside(launched: Handle, *, keeps: object = None) -> Handle:
            result = launched.wait()
            arrival = stream.record_event()

            def finish() -> Any:
                comm.refuse_if_broken((keeps, result))
                for waiting in {launched_on, self._current}:
                    waiting.wait_event(arrival)
                return result

            return Handle(finish)

        with self._module.stream(stream):
            yield beside

    def bring(self, source: Tensor, like: Tensor) -> Tensor:
        if not apart(source, like) or like.device.type != "cpu":
            return super().bring(source, like)
        there = torch.empty(source.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_pinned())
        self.to_host(source, there)
        return there

    def to_host(self, source: Tensor, to: Tensor) -> None:
        self._reductions.wait_stream(self._current)
        with self._module.stream(self._reductions):
            to.copy_(source.to(to.dtype), non_blocking=True)
        self._at_host.add(self._reductions)

    def departure(self) -> Any:
        return self._reductions.record_event()

    def _refuse_recording(self) -> None:
        if self._records():
            raise RuntimeError(
                "a CUDA graph is being recorded, but what zero sends cannot be part of one: its buffers are freed in "
                "between, and hosts compare what they send. Record only what runs inside of wrapped modules."
            )

    def release(self) -> None:
        self._gathers.wait_stream(self._current)

    def settle(self) -> None:
        for stream in self._at_host:
            stream.record_event().synchronize()
        self._at_host.clear()


NONE = NoStreams()


def apart(one: Tensor, other: Tensor) -> bool:
    """Whether they lie on two devices."""
    return one.device != other.device


_known: dict[torch.device, Streams] = {}


def streams_of(tensor: Tensor) -> NoStreams:
    """Those of the device that the tensor is on: the same for all that is sent from there."""
    device = tensor.device
    if device.type == "cpu" or not has_values(tensor) or not hasattr(torch.get_device_module(device), "Stream"):
        return NONE
    if device not in _known:
        _known[device] = Streams(device)
    return _known[device]
