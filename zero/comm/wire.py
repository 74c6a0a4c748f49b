"""How floats travel: in their own dtype, cast to a narrower one, or encoded by a wire of one's own.

A wire sends by the two operations of `Comm`, or by its all-to-all. Whoever asks for a dtype of what is sent takes a
wire as well: a subclass of `Wire` plugs in without a change here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.comm.comm import Comm
from zero.comm.transport import Handle, Message


class Wire:
    """Sends floats as they are.

    `dtype`: the dtype in which gradients are packed for `reduce`; None for that of the parameters.
    `itemsize`: bytes of an element on the wire; None for those of the tensor.
    `block`: elements that travel together; a slice at a multiple of it travels as it would in the full tensor.
    """

    dtype: torch.dtype | None = None
    itemsize: int | None = None
    block: int = 1

    def __repr__(self) -> str:
        return type(self).__name__  # ranks compare their wires by it

    def gather(self, comm: Comm, full: Tensor, bounds: Sequence[int], channel: int, *, keeps_own: bool) -> Handle:
        """Collective. As Comm.gather. keeps_own: this rank's shard in `full` keeps its precision; otherwise it becomes
        what the other ranks receive."""
        return comm.gather(full, bounds, channel)

    def reduce(self, comm: Comm, messages: Sequence[Message], times: float, channel: int) -> Handle:
        """Collective. As Comm.reduce, into a new tensor."""
        return comm.reduce(messages, times=times, channel=channel)

    def across(self) -> Wire:
        """Returns the wire of a gather into a rank's contribution to another gather: that travels once more."""
        return PLAIN

    def arrives_as(self, shard: Tensor) -> Tensor:
        """Returns a flat tensor in the values with which a gather of it ends, with its own shard kept."""
        return shard

    def problem(self, name: str, dtype: torch.dtype, option: str) -> str | None:
        """Returns the error message if parameters of this dtype, or their gradients, cannot be sent so; else None.

        name: of a parameter. option: the argument that this wire was given by.
        """
        return None


PLAIN = Wire()

NAMES: list[str] = []
"""What users write for wires besides dtypes, for error messages."""


class Cast(Wire):
    """Sends floats in a narrower dtype. Gradients are summed in float32; owners keep the precision of their shards."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.itemsize = dtype, dtype.itemsize

    def __repr__(self) -> str:
        return str(self.dtype)

    def gather(self, comm: Comm, full: Tensor, bounds: Sequence[int], channel: int, *, keeps_own: bool) -> Handle:
        assert self.dtype is not None
        if comm.world == 1 or not full.is_floating_point() or self.dtype.itemsize >= full.element_size():
            return comm.gather(full, bounds, channel)
        low, high = bounds[comm.rank : comm.rank + 2]
        sent = full.new_empty(full.numel(), dtype=self.dtype)
        sent[low:high] = full[low:high]
        handle = comm.gather(sent, bounds, channel)

        def finish() -> None:
            handle.wait()
            full[:low] = sent[:low]
            full[high:] = sent[high:]

        return Handle(finish)


def as_wire(given: torch.dtype | Wire | None) -> Wire:
    """Returns the wire for a dtype, a wire, or None, which sends floats as they are."""
    if given is None:
        return PLAIN
    return Cast(given) if isinstance(given, torch.dtype) else given
