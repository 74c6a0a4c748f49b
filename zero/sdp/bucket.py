"""One flat group's gradients on their way to their owners.

    taken     the gradients of this backward, in their own memory, as autograd wrote them: up to one bucket
    messages  each large gradient by itself; the small ones together, by owner, with a usage count of every parameter
              that the owner has something of
    sums      what came to this rank, summed and averaged: what stays, 1/W of a bucket

Nothing large is copied: gradients are sent from where autograd wrote them. A parameter that no rank
used has a count of zero at its owner, and gets no gradient; one that some ranks used gets the average with zeros.
The owner looks at counts only of parameters that it did not use itself: on a GPU it has to wait for what it looks at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import NoReturn

import torch
from torch import Tensor

from zero._torch import profiler_range
from zero.comm import Comm, Handle
from zero.comm.packing import joined
from zero.oss.flat import FlatGroup
from zero.oss.gradients import refuse_sparse
from zero.oss.layout import Span
from zero.sdp.routes import Routes

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
        self._channel = flat.comm.channel(f"the reduction of {flat.label}")
        if replicas is not None:
            self._replica_channel = replicas.channel(f"the averaging over replicas of {flat.label}")
        self.phase = Phase.FILLING
        self.trained: tuple[int, ...] = ()
        self._large: list[int] = []
        self._routes = Routes(flat.layout)
        self._owned: list[Span] = []
        """What this rank owns of each trained parameter, in their order, in which usage is counted."""
        self._as_sent: list[Span] = []
        """The same, those whose gradients travel alone first."""
        self._taken: dict[int, Tensor] = {}
        self.taken_bytes = 0
        self._used_here: frozenset[int] = frozenset()
        """Parameters of which this rank had gradients among those that are on their way."""
        self._handle: Handle | None = None
        self.notice_trained()

    def notice_trained(self, also: Collection[Tensor] = ()) -> bool:
        """Looks anew which parameters are trained, and returns whether they are others; between backwards only.

        also: parameters that count as trained whatever they say of themselves now.
        """
        params = enumerate(self.flat.params)
        trained = tuple(index for index, param in params if param.requires_grad or param in also)
        if trained == self.trained:
            return False
        assert not self._taken and self.phase is Phase.FILLING
        self.trained = trained
        numels, itemsize = self.flat.layout.numels, self.flat.full.element_size()
        self._large = [index for index in trained if travels_alone(numels[index] * itemsize)]
        self._routes = Routes(self.flat.layout, trained, self._large)
        self._owned = [self.flat.spans[index] for index in trained if index in self.flat.spans]
        alone = set(self._large)
        self._as_sent = sorted(self._owned, key=lambda span: span.index not in alone)
        return True

    @property
    def complete(self) -> bool:
        return len(self._taken) == len(self.trained)

    def take(self, index: int, gradient: Tensor) -> None:
        """Takes over the whole gradient of parameter `index`; nothing else should keep it."""
        if self.phase is Phase.REDUCING or index in self._taken:
            self.refuse_late(index)
        refuse_sparse(gradient, self.flat.names[index])
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {self.flat.names[index]} is itself part of a graph (create_graph=True), which "
                "ends where it is reduced. Take inner derivatives by torch.autograd.grad(..., create_graph=True), and "
                "call backward() without."
            )
        self._taken[index] = self.flat.in_memory_order(index, gradient)
        self.taken_bytes += gradient.nbytes

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
        self._used_here = frozenset(self._taken)
        self._forget_taken()
        comm = self.flat.comm
        with profiler_range(f"zero::reduce {self.flat.label}"):
            self._handle = comm.reduce(messages, times=1 / comm.world, channel=self._channel)

    def _large_message(self, index: int) -> tuple[Tensor, list[int]]:
        """A gradient as it is: what each rank owns of it lies in the order of ranks."""
        gradient = self._taken.get(index)
        if gradient is None:
            gradient = self.flat.full.new_zeros(self.flat.layout.numels[index])
        return gradient.to(self._sent_as), self._routes.counts[index]

    def _small_message(self) -> tuple[Tensor, list[int]]:
        """Shares of small gradients for each rank, and for each parameter that it owns something of, 1 if used."""
        sample = self.flat.full
        pieces: list[Tensor] = []
        used: list[bool] = []  # in a large world most ranks get nothing else, and one tensor holds it for many
        for index, start, stop in self._routes.together.shares:
            if stop is None:
                used.append(index in self._taken)
                continue
            if used:
                pieces.append(_as_counts(used, sample))
                used = []
            gradient = self._taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(stop - start)
            elif stop - start < gradient.numel():
                gradient = gradient[start:stop]
            pieces.append(gradient)
        pieces.append(_as_counts(used, sample))
        return joined(pieces).to(self._sent_as), self._routes.together.counts

    def finish(self, deliver: Callable[[int, Tensor | None], None]) -> None:
        """Waits, and delivers for each parameter that this rank owns something of the averaged gradient of its part.

        deliver: called with the parameter's index and a tensor of the part's shape, or None where no rank used it. The
            tensor is of float32 where gradients travelled with 16 bits.
        """
        assert self._handle is not None
        handle, self._handle = self._handle, None
        with profiler_range(f"zero::wait_for_reduce {self.flat.label}"):
            sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        if self._replicas is not None:
            self._replicas.all_reduce(sums, channel=self._replica_channel)
            sums *= 1 / self._replicas.world
        used = self._used_here
        *parts, counts = sums.split([*(span.numel for span in self._as_sent), len(self._owned)])
        if any(span.index not in used for span in self._owned):
            used |= {span.index for span, count in zip(self._owned, counts.tolist(), strict=True) if count}
        for span, part in zip(self._as_sent, parts, strict=True):
            deliver(span.index, self.flat.shaped(span.index, part, span) if span.index in used else None)

    def abandon(self) -> None:
        """Forgets a backward that was interrupted, once what it sent has arrived."""
        self._forget_taken()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
        self.phase = Phase.FILLING

    def _forget_taken(self) -> None:
        self._taken = {}
        self.taken_bytes = 0


def _as_counts(used: list[bool], like: Tensor) -> Tensor:
    """Of one rank: 1 or 0 each. Where all are the same nothing is copied from the host, which on a GPU would wait."""
    return like.new_ones(len(used)) if all(used) else like.new_tensor(used)
