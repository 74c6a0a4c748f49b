"""One group's gradients on their way to their owners.

    taken   the gradients of this backward, in their own memory, as autograd wrote them: up to one bucket
    sums    what came to this rank, summed and averaged: what stays, 1/W of a bucket

A parameter that no rank used has no gradient; one that some ranks used has the average with zeros. Where this rank has
not used what it owns, that is known at the end of the backward only (usage.py).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from zero.comm import Handle, Int8
from zero.oss.gradients import refuse_sparse
from zero.oss.shard_group import ShardGroup
from zero.oss.shown import shown
from zero.sdp.messages import messages_of


class Destination(Protocol):
    """Who keeps the gradients of this rank's shards."""

    def bring(self, group: ShardGroup, sums: Tensor) -> Tensor:
        """Gradients of the group's shard, float32 where they travelled with 16 bits, in the dtype and on the device in
        which they are kept; perhaps still on their way."""

    def receive(self, group: ShardGroup, gradients: Mapping[int, Tensor | None]) -> None:
        """Takes gradients that were brought, by position of the parameter, in the shape of its shard, and adds them to
        those that are there; None where it is not known yet whether there is one."""


class Phase(enum.Enum):
    """Of one backward."""

    FILLING = "waiting for gradients"
    REDUCING = "on the way to the owners"


class GradBucket:
    """Takes the gradients of one group, reduces them to their owners, and hands those of this rank's shard on.

    sent_as: the dtype in which gradients travel, by default their own; or how they are quantised.
    `trained`: positions of the parameters that have gradients.
    `used`: parameters of which this rank had gradients among those that were sent since the last `decide`.
    `missing`: whether this rank had no gradient of some parameter when its gradients were sent.
    """

    def __init__(
        self, group: ShardGroup, destination: Destination, *, sent_as: torch.dtype | Int8 | None = None
    ) -> None:
        self.group, self._destination = group, destination
        self._quantised = sent_as if isinstance(sent_as, Int8) else None
        self._sent_as = sent_as if isinstance(sent_as, torch.dtype) else group.full.dtype
        self.phase = Phase.FILLING
        self._taken: dict[int, Tensor] = {}
        self.taken_bytes = 0
        self.used: set[int] = set()
        self.missing = False
        self._sent: frozenset[int] = frozenset()
        """Parameters of which this rank had gradients among those that are on their way."""
        self._undecided: dict[int, list[Tensor]] = {}
        """What came of parameters that this rank had no gradients of."""
        self._handle: Handle | None = None
        self.trained: tuple[int, ...] = ()
        self._messages = messages_of(group, (), self._sent_as)
        self.notice_trained()

    def notice_trained(self, also: Collection[Tensor] = ()) -> bool:
        """Looks anew which parameters are trained, and returns whether they are others; between backwards only.

        also: parameters that count as trained whatever they say of themselves now.
        """
        params = enumerate(self.group.params)
        trained = tuple(index for index, param in params if param.requires_grad or param in also)
        if trained == self.trained:
            return False
        assert not self._taken and self.phase is Phase.FILLING
        self.trained, self._messages = trained, messages_of(self.group, trained, self._sent_as)
        return True

    # --------------------------------------------------------------------------------------------- filling

    @property
    def complete(self) -> bool:
        return len(self._taken) == len(self.trained)

    def take(self, index: int, gradient: Tensor | None) -> None:
        """Takes over the full gradient of a parameter, if there is one; nothing else should keep it."""
        if gradient is None:
            return
        if self.phase is Phase.REDUCING or index in self._taken:
            self.refuse_late(index)
        name = self.group.names[index]
        refuse_sparse(gradient, name)
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {name} is itself part of a graph (create_graph=True), which ends where it is "
                "reduced. Take inner derivatives by torch.autograd.grad(..., create_graph=True), and call backward() "
                "without."
            )
        self._taken[index] = self.group.shapes.in_memory_order(index, gradient)
        self.taken_bytes += gradient.nbytes

    def refuse_late(self, index: int) -> NoReturn:
        raise RuntimeError(
            f"{self.group.names[index]} got a gradient after its gradients were sent to their owner, in one backward. "
            "Re-entrant checkpointing does this where a parameter is used twice, or where the model returns no tensor "
            "that needs a gradient: use use_reentrant=False."
        )

    def take_leftovers(self) -> None:
        """Takes what lies in `grad` of parameters that this backward did not reach, from backwards under no_sync."""
        for index in self.trained:
            if index not in self._taken:
                param = self.group.params[index]
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    # -------------------------------------------------------------------------------------------- reducing

    def launch(self) -> None:
        """Collective. Sends every gradient to its owner; zeros where this rank has none."""
        assert self.phase is Phase.FILLING
        self.phase = Phase.REDUCING
        group, messages = self.group, self._messages.messages(self._taken)
        self._sent = frozenset(self._taken)
        self.used |= self._sent
        self.missing = self.missing or not self.complete
        self._forget_taken()
        with (
            shown("reduce", group.label, group.comm.rank),
            group.streams.reductions(group.exchange.gathered_by) as beside,
        ):
            self._handle = beside(group.exchange.reduce(messages, self._quantised), keeps=messages)

    def finish(self) -> None:
        """Waits, and hands on of each parameter that this rank owns something of the averaged gradient of its shard:
        None where this rank has not used it, until `decide`."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        group = self.group
        with shown("wait_for_reduce", group.label, group.comm.rank):
            sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        arrived: dict[int, Tensor | None] = {}
        brought = self._destination.bring(group, sums)
        for span, flat in zip(self._messages.owned, self._messages.cut(brought), strict=True):
            shard = group.shapes.shaped(span.index, flat, span)
            arrived[span.index] = shard if span.index in self._sent else None
            if span.index not in self._sent:
                self._undecided.setdefault(span.index, []).append(shard)
        self._destination.receive(group, arrived)

    def decide(self, used: Mapping[int, bool]) -> None:
        """At the end of a backward: hands on what came of parameters that this rank has not used, but others have.

        used: by index, whether any rank has; of none where this rank has nothing to ask for.
        """
        for index, shards in self._undecided.items():
            for shard in shards if used[index] else ():
                self._destination.receive(self.group, {index: shard})
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
