"""One flat group's gradients on their way to their owners.

    taken     the gradients of this backward, in their own memory, as autograd wrote them: up to one bucket
    messages  each large gradient by itself; the small ones together, by owner, with a usage count of every parameter
              that the owner has something of
    sums      what came to this rank, summed and averaged: what stays, 1/W of a bucket

Nothing large is copied: gradients are sent from where autograd wrote them. A parameter that no rank
used has a count of zero at its owner, and gets no gradient; one that some ranks used gets the average with zeros.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from zero.oss.comm import Comm, Handle
from zero.oss.flat import FlatGroup
from zero.oss.layout import Span

_LARGE = 1 << 18
"""Bytes from which a gradient travels by itself. A message costs about as much CPU time as copying this."""


def travels_alone(nbytes: int) -> bool:
    """Whether a gradient of so many bytes is sent from where autograd wrote it, not with others."""
    return nbytes >= _LARGE


class Phase(enum.Enum):
    """Of one backward."""

    FILLING = "waiting for gradients"
    REDUCING = "on the way to the owners"


class GradBucket:
    """Takes the gradients of one flat group, reduces them to their owners, and hands out this rank's parts.

    sent_as: the dtype in which gradients travel, by default their own.
    replicas: the ranks that own the same segments, where a group is sharded within and replicated across (hybrid).
    """

    def __init__(self, flat: FlatGroup, *, sent_as: torch.dtype | None = None, replicas: Comm | None = None) -> None:
        self.flat = flat
        self._replicas = replicas
        self._sent_as = sent_as or flat.full.dtype
        self.phase = Phase.FILLING
        self.trained: tuple[int, ...] = ()
        self._large: list[int] = []
        self._spans: list[dict[int, Span]] = [
            {span.index: span for span in flat.layout.spans(rank)} for rank in range(flat.layout.world)
        ]
        self._taken: dict[int, Tensor] = {}
        self._handle: Handle | None = None
        self.notice_trained()

    def notice_trained(self) -> None:
        """Looks anew which parameters are trained; between backwards only."""
        trained = tuple(index for index, param in enumerate(self.flat.params) if param.requires_grad)
        if trained == self.trained:
            return
        assert not self._taken and self.phase is Phase.FILLING
        self.trained = trained
        numels, itemsize = self.flat.layout.numels, self.flat.full.element_size()
        self._large = [index for index in trained if travels_alone(numels[index] * itemsize)]

    def _small_spans(self, rank: int) -> list[Span]:
        chosen = set(self.trained).difference(self._large)
        return [span for span in self._spans[rank].values() if span.index in chosen]

    def _counted(self, rank: int) -> list[int]:
        """The trained parameters that the rank owns something of."""
        return [index for index in self._spans[rank] if self.flat.params[index].requires_grad]

    @property
    def complete(self) -> bool:
        return len(self._taken) == len(self.trained)

    @property
    def taken_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._taken.values())

    def take(self, index: int, gradient: Tensor) -> None:
        """Takes over the whole gradient of parameter `index`; nothing else should keep it."""
        if self.phase is Phase.REDUCING or index in self._taken:
            self.refuse_late(index)
        if gradient.is_sparse:
            raise RuntimeError(
                f"{self.flat.names[index]} has a sparse gradient. zero shards dense ones: build the embedding with "
                "sparse=False."
            )
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {self.flat.names[index]} is itself part of a graph (create_graph=True), which "
                "ends where it is reduced. Take inner derivatives by torch.autograd.grad(..., create_graph=True), and "
                "call backward() without."
            )
        self._taken[index] = self.flat.in_memory_order(index, gradient)

    def refuse_late(self, index: int) -> NoReturn:
        raise RuntimeError(
            f"{self.flat.names[index]} got a gradient after its gradients were sent to their owner, in one backward. "
            "Re-entrant checkpointing does this where a parameter is used twice, or where the model returns no tensor "
            "that needs a gradient: use use_reentrant=False."
        )

    def take_from(self, param: Tensor, index: int) -> None:
        """Takes over what lies in `param.grad`, if anything does, which is None afterwards."""
        gradient, param.grad = param.grad, None
        if gradient is not None:
            self.take(index, gradient)

    def take_leftovers(self) -> None:
        """Takes what lies in `grad` of parameters that this backward did not reach, from backwards under no_sync."""
        for index in self.trained:
            if index not in self._taken:
                self.take_from(self.flat.params[index], index)

    def launch(self) -> None:
        """Collective. Sends every gradient to its owner; zeros where this rank has none."""
        assert self.phase is Phase.FILLING
        self.phase = Phase.REDUCING
        messages = [self._large_message(index) for index in self._large]
        messages.append(self._small_message())
        self._taken = {}
        self._handle = self.flat.comm.reduce(messages)

    def _large_message(self, index: int) -> tuple[Tensor, list[int]]:
        """A gradient as it is: what each rank owns of it lies in the order of ranks."""
        counts = [spans[index].numel if index in spans else 0 for spans in self._spans]
        gradient = self._taken.get(index)
        if gradient is None:
            gradient = self.flat.full.new_zeros(sum(counts))
        return gradient.to(self._sent_as), counts

    def _small_message(self) -> tuple[Tensor, list[int]]:
        """Shares of small gradients for each rank, and for each parameter that it owns something of, 1 if used."""
        sample = self.flat.full
        pieces, counts = [], []
        for rank in range(self.flat.layout.world):
            shares = [
                self._taken[span.index][span.start : span.stop]
                if span.index in self._taken
                else sample.new_zeros(span.numel)
                for span in self._small_spans(rank)
            ]
            used = [float(index in self._taken) for index in self._counted(rank)]
            shares.append(torch.tensor(used, dtype=sample.dtype, device=sample.device))
            pieces += shares
            counts.append(sum(len(share) for share in shares))
        return torch.cat(pieces).to(self._sent_as), counts

    def finish(self, deliver: Callable[[int, Tensor | None], None]) -> None:
        """Waits, and delivers for each parameter that this rank owns something of the averaged gradient of its part.

        deliver: called with the parameter's index and a tensor of the part's shape, or None where no rank used it. The
            tensor is of float32 where gradients travelled with 16 bits.
        """
        assert self._handle is not None
        handle, self._handle = self._handle, None
        sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        rank = self.flat.comm.rank
        spans = [self._spans[rank][index] for index in self._large if index in self._spans[rank]]
        spans += self._small_spans(rank)
        counted = self._counted(rank)
        ranks = self.flat.comm.world
        if self._replicas is not None:
            self._replicas.all_reduce(sums)
            ranks *= self._replicas.world
        if ranks > 1:
            sums *= 1 / ranks
        used = dict(zip(counted, sums[len(sums) - len(counted) :].tolist(), strict=True))
        low = 0
        for span in spans:
            part = sums[low : low + span.numel]
            deliver(span.index, self.flat.shaped(span.index, part, span) if used[span.index] else None)
            low += span.numel

    def abandon(self) -> None:
        """Forgets a backward that was interrupted, once what it sent has arrived."""
        self._taken = {}
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
        self.phase = Phase.FILLING
