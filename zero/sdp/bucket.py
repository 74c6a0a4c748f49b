"""The bucket of one shard group, which reduces the group's gradients to their owners.

    taken   this rank's gradients of one backward, in the memory in which autograd wrote them: up to one bucket
    sums    the received gradients of this rank's shard, averaged over the ranks: 1/W of a bucket

A parameter that no rank used has no gradient. If only some ranks used it, the others count as zeros in the average. If
this rank did not use a parameter, it learns only at the end of the backward whether another rank did (usage.py).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NoReturn, Protocol

from torch import Tensor

from zero.comm import Handle, Wire
from zero.comm.wire import PLAIN
from zero.oss.gradients import refuse_sparse
from zero.sdp.messages import messages_of
from zero.shards.log import shown
from zero.shards.shard_group import ShardGroup


class Destination(Protocol):
    """Holds the gradients of this rank's shards."""

    def bring(self, group: ShardGroup, sums: Tensor) -> Tensor:
        """Returns the sums (float32 if 16-bit floats were sent) in the dtype and on the device of the gradients. A copy
        to another device may still be in flight."""

    def receive(self, group: ShardGroup, gradients: Mapping[int, Tensor | None]) -> None:
        """Adds gradients, as `bring` returned them, to the held ones. They come by position of the parameter, in the
        shape of its shard; None if it is not known yet whether the parameter has a gradient."""


class Phase(enum.Enum):
    """The phase of a bucket within a backward."""

    FILLING = "waiting for gradients"
    REDUCING = "being reduced to the owners"


class GradBucket:
    """Takes the gradients of one shard group, reduces them to their owners, and passes on those of this rank's shard.

    wire: how gradients are sent.
    `trained`: positions of the parameters that have gradients.
    `used`: positions of the parameters that this rank sent gradients of since the last `decide`.
    `missing`: whether this rank has sent zeros for some parameter since then.
    `reduced`: positions of the parameters that got a gradient on any rank in the last backward that `decide` has ended.
    """

    def __init__(self, group: ShardGroup, destination: Destination, *, wire: Wire = PLAIN) -> None:
        self.group, self._destination, self._wire = group, destination, wire
        self._sent_as = wire.dtype or group.full.dtype
        self.phase = Phase.FILLING
        self._taken: dict[int, Tensor] = {}
        self.taken_bytes = 0
        self.used: set[int] = set()
        self.missing = False
        self.reduced: set[int] = set()
        self._sent: frozenset[int] = frozenset()
        """Positions of the parameters that this rank sent gradients of in the reduce in flight."""
        self._undecided: dict[int, list[Tensor]] = {}
        """Received gradients of parameters that this rank sent no gradients of, by position."""
        self._handle: Handle | None = None
        self.trained: tuple[int, ...] = ()
        self._messages = messages_of(group, (), self._sent_as)
        self.notice_trained()

    def notice_trained(self, also: Collection[Tensor] = ()) -> bool:
        """Updates which parameters are trained, and returns whether they have changed. Only between backwards.

        also: parameters that count as trained even if they do not require gradients now.
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
        """Whether the bucket has taken the gradients of all trained parameters."""
        return len(self._taken) == len(self.trained)

    def take(self, index: int, gradient: Tensor | None) -> None:
        """Takes the full gradient of a parameter, if it is not None. The caller should keep no reference to it."""
        if gradient is None:
            return
        if self.phase is Phase.REDUCING or index in self._taken:
            self.refuse_late(index)
        name = self.group.names[index]
        refuse_sparse(gradient, name)
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {name} is itself part of a graph (create_graph=True), but a reduced gradient cannot "
                "be differentiated. Compute inner derivatives by torch.autograd.grad(..., create_graph=True), and call "
                "backward() without create_graph."
            )
        self._taken[index] = self.group.shapes.in_memory_order(index, gradient)
        self.taken_bytes += gradient.nbytes

    def refuse_late(self, index: int) -> NoReturn:
        """Raises RuntimeError for a gradient that came after the launch."""
        raise RuntimeError(
            f"{self.group.names[index]} got a gradient after its gradients were sent to their owner, in one backward. "
            "Re-entrant checkpointing causes this if a parameter is used twice, or if the model returns no tensor that "
            "requires a gradient: use checkpoint(..., use_reentrant=False)."
        )

    def take_accumulated(self) -> None:
        """Takes gradients accumulated under no_sync of parameters that this backward did not reach."""
        for index in self.trained:
            if index not in self._taken:
                param = self.group.params[index]
                gradient, param.grad = param.grad, None
                self.take(index, gradient)

    # -------------------------------------------------------------------------------------------- reducing

    def launch(self) -> None:
        """Collective. Launches the reduce of all gradients to their owners; missing ones are sent as zeros."""
        assert self.phase is Phase.FILLING
        self.phase = Phase.REDUCING
        group, messages = self.group, self._messages.messages(self._taken)
        self._sent = frozenset(self._taken)
        self.used |= self._sent
        self.missing = self.missing or not self.complete
        self._forget_taken()
        with (
            shown("reduce", group.label, group.comm.rank),
            group.streams.reductions(group.exchange.gathered_by) as on_stream,
        ):
            self._handle = on_stream(group.exchange.reduce(messages, self._wire), keeps=messages)

    def finish(self) -> None:
        """Waits for the reduce, and passes the averaged gradients of this rank's shard to the destination: None for
        parameters that this rank has not used, whose gradients it keeps until `decide`."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        group = self.group
        with shown("wait_for_reduce", group.label, group.comm.rank):
            sums: Tensor = handle.wait()
        self.phase = Phase.FILLING
        received: dict[int, Tensor | None] = {}
        brought = self._destination.bring(group, sums)
        for span, flat in zip(self._messages.owned, self._messages.cut(brought), strict=True):
            gradient = group.shapes.shaped(span.index, flat, span)
            received[span.index] = gradient if span.index in self._sent else None
            if span.index not in self._sent:
                self._undecided.setdefault(span.index, []).append(gradient)
        self._destination.receive(group, received)

    def decide(self, used: Mapping[int, bool]) -> None:
        """Passes on, at the end of a backward, gradients of parameters that only other ranks have used.

        used: whether any rank has used a parameter, by position. May be empty if no rank sent zeros.
        """
        for index, gradients in self._undecided.items():
            for gradient in gradients if used[index] else ():
                self._destination.receive(self.group, {index: gradient})
        self.reduced = self.used.union(index for index, anywhere in used.items() if anywhere)
        self._forget_usage()

    def abandon(self) -> None:
        """Waits for the reduce in flight, and forgets a backward that was interrupted."""
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
