"""One flat group's gradients on their way to their owners.

    taken     the gradients of this backward, in their own memory, as autograd wrote them: up to one bucket
    messages  where transfers overlap with the computing: one, all gradients in the layout's order, so that what is
              launched does not grow with the ranks. Elsewhere each large gradient by itself, from where autograd wrote
              it, and the small ones together, by owner: nothing large is copied
    sums      what came to this rank, summed and averaged: what stays, 1/W of a bucket

A parameter that no rank used has no gradient; one that some ranks used has the average with zeros. Where this rank has
not used what it owns, that is known at the end of the backward only (usage.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from zero._torch import copy_all
from zero.comm import Comm, Handle, Int8
from zero.comm.packing import joined
from zero.comm.streams import streams_of
from zero.comm.transport import Message
from zero.oss.gradients import refuse_sparse
from zero.oss.layout import Span
from zero.oss.shard_group import ShardGroup
from zero.oss.shown import shown
from zero.sdp.routes import Routes

_LARGE = 1 << 18
"""Bytes from which a gradient travels by itself. A message costs about as much CPU time as copying this."""

Deliver = Callable[[int, Tensor | None], None]
"""Called with a parameter's index and the gradient of this rank's shard of it, in its shape; None where there is none.
Of float32 where gradients travelled with 16 bits."""


class Phase(enum.Enum):
    """Of one backward."""

    FILLING = "waiting for gradients"
    REDUCING = "on the way to the owners"


class GradBucket:
    """Takes the gradients of one flat group, reduces them to their owners, and hands out those of this rank's shard.

    sent_as: the dtype in which gradients travel, by default their own; or how they are quantised.
    replicas: the ranks that own the same segments, where a group is sharded within and replicated across (hybrid).
    `used`: parameters of which this rank had gradients among those that were sent since the last `decide`.
    """

    def __init__(
        self, flat: ShardGroup, *, sent_as: torch.dtype | Int8 | None = None, replicas: Comm | None = None
    ) -> None:
        self.flat = flat
        self._replicas = replicas
        self._quantised = sent_as if isinstance(sent_as, Int8) else None
        self._sent_as = flat.full.dtype if sent_as is None or isinstance(sent_as, Int8) else sent_as
        self._channel = flat.comm.channel(f"the reduction of {flat.label}")
        self._streams = flat.streams
        if replicas is not None:
            if replicas.runs_beside(flat.full):  # though nothing may be sent within the group
                self._streams = streams_of(flat.full)
            self._replica_channel = replicas.channel(f"the averaging over replicas of {flat.label}")
        self.phase = Phase.FILLING
        self.trained: tuple[int, ...] = ()
        self._large: list[int] = []
        self._routes = Routes(flat.layout)
        self._owned: list[Span] = []
        """What this rank owns of each trained parameter, those whose gradients travel alone first."""
        self._taken: dict[int, Tensor] = {}
        self.taken_bytes = 0
        self.used: set[int] = set()
        self.missing = False
        """Whether this rank had no gradient of some parameter when its gradients were sent."""
        self._sent: frozenset[int] = frozenset()
        """Parameters of which this rank had gradients among those that are on their way."""
        self._undecided: dict[int, Tensor] = {}
        """What came of parameters that this rank had no gradients of."""
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
        self._large = [index for index in trained if numels[index] * itemsize >= _LARGE]
        self._routes = Routes(self.flat.layout, trained, self._large)
        alone = set(self._large)
        owned = [self.flat.spans[index] for index in trained if index in self.flat.spans]
        self._owned = sorted(owned, key=lambda span: span.index not in alone)
        return True

    # --------------------------------------------------------------------------------------------- filling

    @property
    def complete(self) -> bool:
        return len(self._taken) == len(self.trained)

    def take(self, index: int, gradient: Tensor) -> None:
        """Takes over the full gradient of parameter `index`; nothing else should keep it."""
        if self.phase is Phase.REDUCING or index in self._taken:
            self.refuse_late(index)
        refuse_sparse(gradient, self.flat.names[index])
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {self.flat.names[index]} is itself part of a graph (create_graph=True), which "
                "ends where it is reduced. Take inner derivatives by torch.autograd.grad(..., create_graph=True), and "
                "call backward() without."
            )
        self._taken[index] = self.flat.shapes.in_memory_order(index, gradient)
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

    # -------------------------------------------------------------------------------------------- reducing

    def launch(self) -> None:
        """Collective. Sends every gradient to its owner; zeros where this rank has none."""
        assert self.phase is Phase.FILLING
        self.phase = Phase.REDUCING
        if self._packs:
            messages = [(self._in_layout_order(), self._lengths)]
        else:
            messages = [self._large_message(index) for index in self._large]
            messages.append(self._small_message())
        self._sent = frozenset(self._taken)
        self.used |= self._sent
        self.missing = self.missing or not self.complete
        self._forget_taken()
        with shown("reduce", self.flat.label, self.flat.comm.rank):
            self._handle = self._streams.reduce(self.flat.sends_by, partial(self._reduce, messages))

    def _reduce(self, messages: Sequence[Message]) -> Handle:
        comm, replicas = self.flat.comm, self._replicas
        if self.flat.node_shard is not None:
            return self.flat.node_shard.reduce(messages[0][0], self._quantised)
        handle = comm.reduce(messages, times=1 / comm.world, channel=self._channel, sent_as=self._quantised)
        if replicas is None:
            return handle

        def average() -> Tensor:
            sums: Tensor = handle.wait()
            replicas.all_reduce(sums, channel=self._replica_channel)
            return sums.mul_(1 / replicas.world)

        return Handle(average)

    @property
    def _packs(self) -> bool:
        """Whether gradients travel in one message, in the layout's order."""
        return self.flat.node_shard is not None or self.flat.comm.runs_beside(self.flat.full)

    def _in_layout_order(self) -> Tensor:
        """All gradients, flat; zeros where there are none."""
        packed = self.flat.full.new_zeros(self.flat.layout.numel, dtype=self._sent_as)
        offsets, numels = self.flat.layout.offsets, self.flat.layout.numels
        places = [packed[offsets[index] : offsets[index] + numels[index]] for index in self._taken]
        if places:
            copy_all(places, [*self._taken.values()])
        return packed

    @cached_property
    def _lengths(self) -> list[int]:
        """Of the shards, by rank."""
        return [high - low for low, high in pairwise(self.flat.layout.bounds)]

    def _large_message(self, index: int) -> tuple[Tensor, list[int]]:
        """A gradient as it is: what each rank owns of it lies in the order of ranks."""
        gradient = self._taken.get(index)
        if gradient is None:
            gradient = self.flat.full.new_zeros(self.flat.layout.numels[index])
        return gradient.to(self._sent_as), self._routes.counts[index]

    def _small_message(self) -> tuple[Tensor, list[int]]:
        """Shares of small gradients for each rank."""
        sample = self.flat.full
        shares = [sample[:0]]
        for index, start, stop in self._routes.together.shares:
            gradient = self._taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(stop - start)
            elif stop - start < gradient.numel():
                gradient = gradient[start:stop]
            shares.append(gradient)
        return joined(shares).to(self._sent_as), self._routes.together.counts

    def finish(self, deliver: Deliver) -> None:
        """Waits, and delivers for each parameter that this rank owns something of the averaged gradient of its shard:
        None where this rank has not used it, for `decide` to tell."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        with shown("wait_for_reduce", self.flat.label, self.flat.comm.rank):
            sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        for span, shard in zip(self._owned, self._by_parameter(sums), strict=True):
            shard = self.flat.shapes.shaped(span.index, shard, span)
            if span.index in self._sent:
                deliver(span.index, shard)
                continue
            before = self._undecided.get(span.index)
            self._undecided[span.index] = shard if before is None else before.add_(shard)
            deliver(span.index, None)

    def _by_parameter(self, sums: Tensor) -> list[Tensor]:
        """What came of each parameter that this rank owns something of, flat."""
        if self._packs:
            return [sums[span.offset : span.offset + span.numel] for span in self._owned]
        return [*sums.split([span.numel for span in self._owned])] if self._owned else []

    def decide(self, used: Mapping[int, bool], deliver: Deliver) -> None:
        """At the end of a backward: delivers what came of parameters that this rank has not used, but others have.

        used: by index, whether any rank has; of none where this rank has nothing to ask for.
        """
        for index, shard in self._undecided.items():
            if used[index]:
                deliver(index, shard)
        self._forget_usage()

    def abandon(self) -> None:
        """Forgets a backward that was interrupted, once what it sent has arrived."""
        self._forget_taken()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
        self._forget_usage()
        self.phase = Phase.FILLING

    def _forget_taken(self) -> None:
        self._taken = {}
        self.taken_bytes = 0

    def _forget_usage(self) -> None:
        self._undecided = {}
        self.used = set()
        self.missing = False
