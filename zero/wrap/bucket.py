"""The bucket of one shard group, which reduces the group's gradients to their owners.

    taken   this rank's gradients of one backward, in the memory in which autograd wrote them: up to one bucket
    sums    the received gradients of this rank's shard, averaged over the ranks: 1/W of a bucket

A parameter that no rank used has no gradient. If only some ranks used it, the others count as zeros in the average. If
this rank did not use a parameter, it learns only at the end of the backward whether another rank did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors, foreach
from zero.comm import Comm, Work
from zero.comm.packing import summed_as
from zero.comm.together import Together
from zero.shards.shard_group import ShardGroup
from zero.wrap.messages import messages_of
from zero.wrap.refused import CREATE_GRAPH, refuse_sparse


class GradBucket:
    """Takes the gradients of one shard group, and reduces them to their owners.

    shards: by position of the parameter, what is stepped for it: its `grad` is the gradient of this rank's shard.
    sent_as: the dtype in which gradients are sent, by default that of the full parameters; where transfers overlap
        computing, that of the sums.
    `trained`: positions of the parameters that have gradients.
    `taken`: flat gradients that it has taken and not sent, by position.
    `used`: positions of the parameters that this rank sent gradients of since the last `decide`.
    `missing`: whether this rank has sent zeros for some parameter since then.
    `reduced`: positions of the parameters that got a gradient on any rank in the last backward that `decide` has ended.
    """

    def __init__(self, group: ShardGroup, shards: Sequence[Tensor], *, sent_as: torch.dtype | None = None) -> None:
        self.group, self._shards = group, shards
        # Rings send each byte of float32 to another host once, and an all-to-all of 16 bits more than that.
        self._sent_as = sent_as or (summed_as(group.full.dtype) if group.overlaps else group.full.dtype)
        self.taken: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.missing = False
        self.reduced: set[int] = set()
        # Positions of the parameters that this rank sent gradients of in the reduce in flight.
        self._sent: frozenset[int] = frozenset()
        # Received gradients of parameters that this rank sent no gradients of, with their positions.
        self._undecided: list[tuple[int, Tensor]] = []
        # Gradients of shards, and what is to be added to them.
        self._addends: list[tuple[Tensor, Tensor]] = []
        self._handle: Work | None = None
        self.trained: tuple[int, ...] = ()
        self._messages = messages_of(group, (), self._sent_as)
        self.notice_trained()

    def notice_trained(self, also: Collection[Tensor] = ()) -> bool:
        """Updates which parameters are trained, and returns whether they have changed. Only between backwards.

        also: parameters that count as trained even if they do not require gradients now.
        """
        with as_plain_tensors():
            params = enumerate(self.group.params)
            trained = tuple([index for index, param in params if param.requires_grad or param in also])
        if trained == self.trained:
            return False
        assert not self.taken and self._handle is None
        self.trained, self._messages = trained, messages_of(self.group, trained, self._sent_as)
        return True

    @property
    def complete(self) -> bool:
        """Whether the bucket has taken the gradients of all trained parameters."""
        return len(self.taken) == len(self.trained)

    def take(self, index: int, gradient: Tensor | None) -> None:
        """Takes the full gradient of a parameter, if it is not None. The caller should keep no reference to it."""
        if gradient is None:
            return
        if self._handle is not None or index in self.taken:
            self.refuse_late(index)
        if gradient.is_sparse:
            refuse_sparse(self.group.names[index])
        if gradient.requires_grad:
            raise RuntimeError(CREATE_GRAPH.format(self.group.names[index]))
        self.taken[index] = self.group.shapes.in_memory_order(index, gradient)

    def refuse_late(self, index: int) -> NoReturn:
        """Raises RuntimeError for a gradient that came after the launch."""
        raise RuntimeError(
            f"{self.group.names[index]} got a gradient after its gradients were sent to their owner, in one backward. "
            "Re-entrant checkpointing causes this if a parameter is used twice, or if the model returns no tensor that "
            "requires a gradient: use checkpoint(..., use_reentrant=False)."
        )

    def launch(self) -> None:
        """Collective. Launches the reduce of all gradients to their owners; missing ones are sent as zeros."""
        group, messages = self.group, self._messages.messages(self.taken)
        self._sent = frozenset(self.taken)
        self.used |= self._sent
        self.missing = self.missing or len(self._sent) < len(self.trained)
        self.taken = {}
        with group.recorded("reduce"):
            self._handle = group.exchange.reduce(messages, group.streams)

    def wait_for_sent(self) -> bool:
        """Waits for what the reduce in flight has sent. Returns whether sums or averages over replicas are left; if not
        has done nothing."""
        return self._handle is not None and self._handle.wait_for_sent()

    def finish(self) -> None:
        """Waits for the reduce, if one is in flight, and adds the averages to the gradients of this rank's shard. It
        keeps those of parameters that this rank has not used until `decide`."""
        handle, self._handle, group = self._handle, None, self.group
        if handle is None:
            return
        with group.recorded("wait_for_reduce"):
            sums: Tensor = handle.wait()
        used: list[tuple[int, Tensor]] = []
        received = group.to_main(sums)
        if group.offload.active:
            group.offload.copied(received, sums, [flat for _, flat in self._messages.cut(sums)])
        for index, flat in self._messages.cut(received):
            gradient = group.shapes.shaped(index, flat)
            (used if index in self._sent else self._undecided).append((index, gradient))
        self._add(used)

    def _add(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        for index, gradient in gradients:
            shard = self._shards[index]
            if shard.grad is None:
                self._set(index, gradient)
            else:
                self._addends.append((shard.grad, gradient))
        if not self.group.copies or not self.group.main.is_pinned():  # for those copies the host has waited
            self._add_what_arrived()

    def _add_what_arrived(self) -> None:
        """Adds to gradients what may have been on its way to the CPU. Within a backward the host does not wait for
        it."""
        if self._addends:
            self.group.wait_for_copies()
            held, added = zip(*self._addends, strict=True)
            self._addends = []
            foreach("add_", held, added)

    def _set(self, index: int, gradient: Tensor) -> None:
        """Makes it the gradient of a shard that has none."""
        self._shards[index].grad = gradient

    def decide(self, used: Mapping[int, bool]) -> None:
        """Adds, at the end of a backward, gradients of parameters that only other ranks have used.

        used: whether any rank has used a parameter, by position. May be empty if no rank sent zeros.
        """
        for index, gradient in self._undecided:
            if used[index]:
                self._add([(index, gradient)])  # one by one: there may be two of a parameter
        self._add_what_arrived()
        self.reduced = self.used.union(index for index, anywhere in used.items() if anywhere)
        self._forget_usage()

    def abandon(self) -> None:
        """Waits for the reduce in flight, and forgets a backward that was interrupted."""
        self.taken = {}
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        self._forget_usage()

    def _forget_usage(self) -> None:
        self._undecided, self._addends, self.used, self.missing = [], [], set(), False


_FORWARD_ALONE = (
    "a forward ran under no_sync() and its backward outside, which has sent the gradients now. "
    "DistributedDataParallel, which decides in forward, would have kept them. Run both under zero.no_sync(model): sums "
    "of gradients that are sent one after another round differently."
)


class EndOfBackward:
    """The end of the backwards of one model, where ranks compare their operations and exchange which parameters they
    have used. comms: the process groups to compare, one after another. `together`: around it. `forwards`: of those that
    the backward has come to so far, whether their gradients were to be reduced then, or accumulated under no_sync."""

    def __init__(self, comms: Sequence[Comm], name: str) -> None:
        self._comms, self.together = comms, Together(comms, name)
        self.forwards, self._has_warned = list[bool](), False

    def reach(self, buckets: Sequence[GradBucket], *, reduces: bool = True) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have done the same operations.

        Adds the gradients of parameters that only other ranks have used. For this, ranks exchange one byte for each
        trained parameter, but only if some rank has sent zeros.
        """
        used_here = reduces and any(bucket.used for bucket in buckets)  # torch.autograd.grad writes into none
        if used_here and self.forwards and not any(self.forwards) and not self._has_warned:
            self._has_warned = True
            warn_user(_FORWARD_ALONE)
        some_sent_zeros = self.together.agree(int(any(bucket.missing for bucket in buckets)))
        used = self._used_anywhere(buckets) if some_sent_zeros else [{} for _ in buckets]
        for bucket, anywhere in zip(buckets, used, strict=True):
            bucket.decide(anywhere)

    def _used_anywhere(self, buckets: Sequence[GradBucket]) -> list[dict[int, bool]]:
        """Collective. Returns for each bucket whether any rank has used a parameter, by position."""
        used_here = [i in bucket.used for bucket in buckets for i in bucket.trained]
        anywhere = torch.tensor(used_here, dtype=torch.uint8, device="cpu")
        for comm in self._comms:
            comm.all_reduce(anywhere, maximum=True)
        found = iter(anywhere.bool().tolist())
        return [{index: next(found) for index in bucket.trained} for bucket in buckets]
