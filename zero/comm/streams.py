"""What the stages ask of the streams of a device, beside which transfers run. By default there are none, and everything
runs where it is launched: zero/features/streams has those of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zero._torch import has_values
from zero.comm.comm import Comm
from zero.comm.transport import Handle


class Arrived:
    """In the place of an event after copies that were synchronous."""

    def synchronize(self) -> None: ...


ARRIVED = Arrived()


class NoStreams:
    """The interface, and the answers for devices without streams, such as the CPU."""

    def gather(
        self, comm: Comm, launch: Callable[[], Handle], *, keeps: object, ahead: bool, from_host: bool
    ) -> Handle:
        """Launches an all-gather beside the computing. Returns a handle whose `wait` makes the computing stream wait.

        keeps: tensors to keep alive until then. from_host: it reads the memory of the CPU. ahead: it does not wait for
        the computing since `begin`, only for the uses of released buffers.
        """
        return launch()

    def reduce(self, comm: Comm, launch: Callable[[], Handle], *, keeps: object) -> Handle:
        """Launches a reduction of tensors computed so far beside the computing. See `gather`."""
        return launch()

    def bring(self, source: Tensor, like: Tensor) -> Tensor:
        """Returns `source` on the device of `like`, in the narrower dtype of both. A copy to the CPU is complete only
        after the host has waited for `departure`, or has called `settle`."""
        return source.to(like.device, like.dtype)

    def send(self, source: Tensor, to: Tensor) -> None:
        """Copies a tensor in the memory of the CPU to one on the device, in its dtype. `source` must not change before
        `settle`."""
        to.copy_(source)

    def departure(self) -> Any:
        """Returns an event after all copies to the CPU so far."""
        return ARRIVED

    def begin(self) -> None:
        """Marks the start of a forward or backward. Its all-gathers `ahead` wait for all computing until here."""

    def compute_here(self) -> None:
        """Makes the current stream the computing stream."""

    def expect_computing(self, what: str, of: str) -> None:
        """Raises RuntimeError if the current stream is not the one on which the forward or backward began: transfers
        are ordered with that stream only. what: the code that runs here, for the user, with {} in place of `of`."""

    def release(self) -> None:
        """Orders later all-gathers after the computing so far, which was the last use of a full buffer."""

    def settle(self) -> None:
        """Waits on the host until no stream reads or writes the memory of the CPU any more."""


NONE = NoStreams()


class ModelStreams(NoStreams):
    """The streams of all shard groups of one model, as one."""

    def __init__(self, streams: Iterable[NoStreams]) -> None:
        self._all = [one for one in dict.fromkeys(streams) if one is not NONE]

    def begin(self) -> None:
        for one in self._all:
            one.begin()

    def compute_here(self) -> None:
        for one in self._all:
            one.compute_here()

    def expect_computing(self, what: str, of: str) -> None:
        for one in self._all:
            one.expect_computing(what, of)

    def settle(self) -> None:
        for one in self._all:
            one.settle()


def apart(first: Tensor, second: Tensor) -> bool:
    """Returns whether the tensors are on different devices."""
    return first.device != second.device


stream_makers: list[Callable[[torch.device], NoStreams | None]] = []
"""Asked for the streams of a device, one after another."""


def streams_of(tensor: Tensor) -> NoStreams:
    """Returns the streams of the tensor's device: one object for each device."""
    if tensor.device.type == "cpu" or not has_values(tensor):
        return NONE
    made = (make(tensor.device) for make in stream_makers)
    return next((streams for streams in made if streams is not None), NONE)
