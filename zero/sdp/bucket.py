"""One flat group's gradients on their way to their owners.

    taken     the gradients of this backward, in their own memory, as autograd wrote them: up to one bucket
    parcels   for each rank, views of `taken` on what lies in its segment, and one usage count per parameter there
    sums      this rank's parcel summed over the ranks and averaged: what stays, 1/W of a bucket

Nothing is copied into a bucket: large gradients are sent from where autograd wrote them. A parameter that no rank
used has a count of zero at its owner, and gets no gradient; one that some ranks used gets the average with zeros.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from zero.oss.comm import Handle
from zero.oss.flat import FlatGroup
from zero.oss.layout import Span


class Phase(enum.Enum):
    """Of one backward."""

    FILLING = "waiting for gradients"
    REDUCING = "on the way to the owners"


class GradBucket:
    """Takes the gradients of one flat group, reduces them to their owners, and hands out this rank's parts."""

    def __init__(self, flat: FlatGroup) -> None:
        self.flat = flat
        self.phase = Phase.FILLING
        self.trained: tuple[int, ...] = ()
        self._parcels: list[list[Span]] = []
        self._taken: dict[int, Tensor] = {}
        self._handle: Handle | None = None
        self._channel = flat.comm.channel(f"the reduction of the gradients of {flat.names[0]} and {len(flat.names) - 1} more")
        self.notice_trained()

    def notice_trained(self) -> None:
        """Looks anew which parameters are trained; between backwards only."""
        trained = tuple(index for index, param in enumerate(self.flat.params) if param.requires_grad)
        if trained == self.trained:
            return
        assert not self._taken and self.phase is Phase.FILLING
        self.trained = trained
        # The largest first: what is small then lies together, and travels as one message.
        self._parcels = [
            sorted((span for span in self.flat.layout.spans(rank) if span.index in trained), key=lambda span: -span.numel)
            for rank in range(self.flat.layout.world)
        ]

    @property
    def complete(self) -> bool:
        return len(self._taken) == len(self.trained)

    @property
    def taken_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._taken.values())

    def take(self, index: int) -> None:
        """Takes over `grad` of parameter `index`, which is None afterwards."""
        param = self.flat.params[index]
        gradient = param.grad
        assert gradient is not None
        if self.phase is Phase.REDUCING or index in self._taken:
            raise RuntimeError(
                f"{self.flat.names[index]} got a gradient after its gradients were sent to their owner in the same "
                "backward. Re-entrant checkpointing does this where the model returns no tensor that needs a gradient, "
                "or in an object that zero cannot look into: use use_reentrant=False, or return tensors, tuples or dicts."
            )
        if gradient.is_sparse:
            raise RuntimeError(
                f"{self.flat.names[index]} has a sparse gradient. zero shards dense ones: build the embedding with "
                "sparse=False."
            )
        self._taken[index] = self.flat.in_memory_order(index, gradient)
        param.grad = None

    def take_leftovers(self) -> None:
        """Takes what lies in `grad` of parameters that this backward did not reach, from backwards under no_sync."""
        for index in self.trained:
            if index not in self._taken and self.flat.params[index].grad is not None:
                self.take(index)

    def launch(self) -> None:
        """Collective. Sends every gradient to its owner; zeros where this rank has none."""
        assert self.phase is Phase.FILLING
        self.phase = Phase.REDUCING
        longest = max((span.numel for spans in self._parcels for span in spans if span.index not in self._taken), default=0)
        sample = self.flat.full
        zeros = sample.new_zeros(longest)
        pieces = [
            [
                *(
                    self._taken[span.index][span.start : span.stop] if span.index in self._taken else zeros[: span.numel]
                    for span in spans
                ),
                torch.tensor([float(span.index in self._taken) for span in spans], dtype=sample.dtype, device=sample.device),
            ]
            for spans in self._parcels
        ]
        self._taken = {}
        self._handle = self.flat.comm.reduce(pieces, self._channel)

    def finish(self, deliver: Callable[[int, Tensor | None], None]) -> None:
        """Waits, and delivers for each parameter that this rank owns something of the averaged gradient of its part.

        deliver: called with the parameter's index and a tensor of the part's shape, or None where no rank used it.
        """
        assert self._handle is not None
        handle, self._handle = self._handle, None
        sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        spans = self._parcels[self.flat.comm.rank]
        if self.flat.comm.world > 1:
            sums *= 1 / self.flat.comm.world
        sums = sums.to(self.flat.full.dtype)
        low = 0
        for span, used in zip(spans, sums[len(sums) - len(spans) :].tolist(), strict=True):
            part = sums[low : low + span.numel]
            deliver(span.index, self.flat.shaped(span.index, part, span) if used else None)
            low += span.numel

    def abandon(self) -> None:
        """Forgets a backward that was interrupted, once what it sent has arrived."""
        self._taken = {}
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
        self.phase = Phase.FILLING
