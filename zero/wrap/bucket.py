"""The bucket of one shard group, which reduces the group's gradients to their owners.

    taken   this rank's gradients of one backward, in the memory in which autograd wrote them: up to one bucket
    sums    the received gradients of this rank's shard, averaged over the ranks: 1/W of a bucket

A parameter that no rank used has no gradient. If only some ranks used it, the others count as zeros in the average. If
this rank did not use a parameter, it learns only at the end of the backward whether another rank did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors, foreach, has_values, part_of, shares_memory
from zero.comm import Comm, Work
from zero.comm.together import Together
from zero.comm.transport import Message, concatenate, lengths, summed_as
from zero.shards.cut import Cut
from zero.shards.shard_group import ShardGroup
from zero.wrap.gradients import CREATE_GRAPH, OwnedGradient, Wide, WideAverage, as_wide_average, refuse_sparse

# ------------------------------------------------------------------------------------------------------------- messages
#
# The messages by which the gradients of one shard group are reduced to their owners.
#
# InOneMessage  one message of all gradients in the layout's order, where transfers overlap with computing: the number
#               of launches does not depend on the number of ranks
# ByOwner       one message for each large gradient, from the memory in which autograd wrote it, and one message of all
#               small gradients, ordered by owner: no large gradient is copied


# Bytes from which a gradient is a message by itself. A message costs about as much CPU time as copying this much.
_LARGE = 1 << 18

Gradients = Mapping[int, Tensor]
"""Flat gradients in the order of the layout, by position of the parameter. Missing gradients are sent as zeros."""


class InOneMessage:
    """All gradients in one message. trained: positions of the parameters that have gradients. dtype: the dtype in which
    they are sent."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype, self._numel = group, dtype, group.layout.numel
        owned = [group.shapes.spans[index] for index in trained if index in group.shapes.spans]
        self._owned = [(span.index, slice(span.offset, span.offset + span.numel)) for span in owned]
        starts = [*group.layout.offsets, group.layout.numel]
        lengths_with_padding = [after - start for start, after in pairwise(starts)]
        # The lengths of the padding before the first gradient, and of gradients and of the padding after each, in turn.
        self._pieces = [starts[0]]
        for numel, both in zip(group.layout.numels, lengths_with_padding, strict=True):
            self._pieces += numel, both - numel
        self._padding = {number for number, size in enumerate(self._pieces) if size and not number % 2}

    @cached_property
    def _lengths(self) -> list[int]:
        """The lengths of the shards, by rank. Computed when needed, because there may be thousands of ranks."""
        return lengths(self._group.layout.bounds)

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        packed = self._group.full.new_empty(self._numel, dtype=self._dtype)
        views = packed.split(self._pieces)
        missing = {2 * index + 1 for index in range(len(views) // 2) if index not in taken}
        if missing or self._padding:
            foreach("zero_", [views[number] for number in sorted(self._padding | missing)])
        if taken:
            foreach("copy_", [views[2 * index + 1] for index in taken], [*taken.values()])
        return [(packed, self._lengths)]

    def cut(self, sums: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Returns the flat sums of what this rank owns of trained parameters, with their positions."""
        return [(index, sums[own]) for index, own in self._owned]


class ByOwner:
    """Sends large gradients without a copy. Arguments and methods are those of InOneMessage."""

    def __init__(self, group: ShardGroup, trained: Sequence[int], dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        numels, itemsize = group.layout.numels, group.full.element_size()
        large = {index for index in trained if numels[index] * itemsize >= _LARGE}
        self._large = [index for index in trained if index in large]
        self._small = [index for index in trained if index not in large]
        self._owned = [index for index in (*self._large, *self._small) if index in group.shapes.spans]
        self._numels = [group.shapes.spans[index].numel for index in self._owned]

    # What grows with the number of ranks is computed only when the first gradients are sent.

    @cached_property
    def _large_counts(self) -> list[list[int]]:
        """The number of elements that go to each rank, for each large gradient."""
        layout = self._group.layout
        counts = [[0] * layout.world for _ in self._large]
        for index, to_ranks in zip(self._large, counts, strict=True):
            for rank, start, stop in layout.owners(index):
                to_ranks[rank] = stop - start
        return counts

    @cached_property
    def _shares(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """The shares of small gradients in rank order, as (index, start, stop), and the number of elements a rank."""
        layout = self._group.layout
        by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.world)]
        for index in self._small:
            for rank, start, stop in layout.owners(index):
                by_rank[rank].append((index, start, stop))
        counts = [sum(stop - start for _, start, stop in shares) for shares in by_rank]
        return [share for shares in by_rank for share in shares], counts

    def messages(self, taken: Gradients) -> list[Message]:
        """Returns the messages to reduce."""
        sample, (shares, counts) = self._group.full, self._shares
        messages: list[Message] = []
        for index, to_ranks in zip(self._large, self._large_counts, strict=True):
            gradient = taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(self._group.layout.numels[index])
            messages.append((gradient.to(self._dtype), to_ranks))  # the ranks' shards of it are in rank order
        small = [sample[:0]]
        for index, start, stop in shares:
            gradient = taken.get(index)
            if gradient is None:
                gradient = sample.new_zeros(stop - start)
            small.append(gradient if len(gradient) == stop - start else gradient[start:stop])
        return [*messages, (concatenate(small).to(self._dtype), counts)]

    def cut(self, sums: Tensor) -> Iterable[tuple[int, Tensor]]:
        return zip(self._owned, sums.split(self._numels), strict=True) if self._owned else ()


# -------------------------------------------------------------------------------------------------------------- buckets


class GradBucket:
    """Takes the gradients of one shard group, and reduces them to their owners.

    sent_as: the dtype in which gradients are sent if it can be, by default that of the full parameters; where
        transfers overlap computing, that of the sums.
    of: the parameters that the model has; the optimizer may step more. By default all.
    with_groups: further groups of a bucket of several (FullBucket). `params`: of all its groups, by position.
    `own`: positions of the parameters that the model has.
    `trained`: positions of the parameters that have gradients.
    `taken`: flat gradients that it has taken and not sent, by position.
    `used`: positions of the parameters that this rank sent gradients of since the last `add_unused`.
    `missing`: whether this rank has sent zeros for some parameter since then.
    `late`: whether any rank had to in the last backward that has ended: at its end alone the bucket was complete there.
    `launched`: whether the running backward has launched it.
    `accumulated`: positions of the parameters whose gradients this rank has written since they were averaged last.
    `lost`: whether a backward that has failed has taken some of these.
    `reduced`: positions of the parameters that got a gradient on any rank in the last backward that has ended.
    """

    def __init__(
        self,
        group: ShardGroup,
        *,
        sent_as: torch.dtype | None = None,
        of: Collection[Tensor] | None = None,
        with_groups: Sequence[ShardGroup] = (),
    ) -> None:
        self.group, self.groups = group, [group, *with_groups]
        self.params = [param for one in self.groups for param in one.params]
        self.own = [index for index, param in enumerate(self.params) if of is None or param in of]
        # Beside the computing sums are made on their way, in what is sent: between hosts always, where float16 is not
        # wide enough for them, and bfloat16 is for who asks for it.
        self._sent_as = sent_as or (summed_as(group.full.dtype) if group.overlaps else group.full.dtype)
        if self._sent_as is torch.float16 and not group.one_host:
            self._sent_as = torch.float32
        self.taken: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.missing = self.launched = self.late = False
        self.reduced: set[int] = set()
        self.accumulated, self.lost = set[int](), False
        # Positions of the parameters that this rank sent gradients of in the reduce in flight.
        self._sent: frozenset[int] = frozenset()
        # Received gradients of parameters that this rank sent no gradients of, with their positions.
        self._maybe_unused: list[tuple[int, Tensor]] = []
        # Gradients of shards, and what is to be added to them.
        self._addends: list[tuple[Tensor, Tensor]] = []
        self._handle: Work | None = None
        self.trained: tuple[int, ...] = ()
        # Positions of parameters that required gradients in a forward since the last backward.
        self._trained_in_forward = set[int]()
        self.notice_trained()

    @property
    def names(self) -> list[str]:
        """Of the parameters, by position."""
        if len(self.groups) == 1:  # asked for each gradient
            return self.group.names
        return [name for one in self.groups for name in one.names]

    def notice_forward(self) -> None:
        """Notices which parameters require gradients in a forward: they may be frozen by the time of its backward."""
        self._trained_in_forward.update(index for index in self.own if self.params[index].requires_grad)

    def notice_trained(self) -> bool:
        """Updates which parameters are trained, and returns whether they have changed. Only between backwards."""
        with as_plain_tensors():
            params, also = self.params, self._trained_in_forward
            trained = tuple([index for index in self.own if params[index].requires_grad or index in also])
        also.clear()
        if trained == self.trained:
            return False
        assert not self.taken and self._handle is None
        self.trained = trained
        self.__dict__.pop("_messages", None)
        return True

    @cached_property
    def _messages(self) -> InOneMessage | ByOwner:
        return (InOneMessage if self.group.overlaps else ByOwner)(self.group, self.trained, self._sent_as)

    def take(self, index: int, gradient: Tensor | None) -> None:
        """Takes the full gradient of a parameter, if it is not None. The caller should keep no reference to it."""
        if gradient is not None:
            self._refuse(index, gradient)
            self.taken[index] = self.group.shapes.in_memory_order(index, gradient)

    def _refuse(self, index: int, gradient: Tensor) -> None:
        """Raises RuntimeError for a gradient that cannot be taken."""
        if self.launched or self._handle is not None or index in self.taken:
            self.refuse_late(index)
        if gradient.is_sparse:
            refuse_sparse(self.names[index])
        if gradient.requires_grad:
            raise RuntimeError(CREATE_GRAPH.format(self.names[index]))

    def refuse_late(self, index: int) -> NoReturn:
        """Raises RuntimeError for a gradient that came after the launch."""
        raise RuntimeError(
            f"{self.names[index]} got a gradient after its gradients were sent to their owner, in one backward. "
            "Re-entrant checkpointing causes this if a parameter is used twice, or if the model returns no tensor that "
            "requires a gradient: use checkpoint(..., use_reentrant=False)."
        )

    def launch(self) -> None:
        """Collective. Launches the reduce of all gradients to their owners; missing ones are sent as zeros."""
        with self.group.recorded("reduce"):
            self._handle = self._reduce()
        self._sent = frozenset(self.taken)
        self.used |= self._sent
        self.missing = self.missing or len(self._sent) < len(self.trained)
        self.taken = {}

    def _reduce(self) -> Work:
        return self.group.reduce(self._messages.messages(self.taken))

    def wait_for_sent(self) -> bool:
        """Waits for what the reduce in flight has sent. Returns whether sums or averages over replicas are left; if not
        has done nothing."""
        return self._handle is not None and self._handle.wait_for_sent()

    def finish(self) -> None:
        """Waits for the reduce, if one is in flight, and adds the averages to the gradients of this rank's shard. It
        keeps those of parameters that this rank has not used until `add_unused`."""
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
            (used if index in self._sent else self._maybe_unused).append((index, gradient))
        self._add(used)

    def _add(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        for index, gradient in gradients:
            held = self._held(index)
            if held is None:
                self._set(index, gradient)
            else:
                self._addends.append((held, gradient))
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

    def _held(self, index: int) -> Tensor | None:
        """The gradient that this rank's shard of a parameter has already."""
        raise NotImplementedError

    def _set(self, index: int, gradient: Tensor) -> None:
        """Makes it the gradient of a shard that has none."""
        raise NotImplementedError

    def add_unused(self, used: Mapping[int, bool]) -> None:
        """Adds, at the end of a backward, gradients of parameters that only other ranks have used.

        used: whether any rank has used a parameter, by position. May be empty if no rank sent zeros.
        """
        for index, gradient in self._maybe_unused:
            if used[index]:
                self._add([(index, gradient)])  # one by one: there may be two of a parameter
        self._add_what_arrived()
        self.reduced = self.used.union(index for index, anywhere in used.items() if anywhere)
        self._forget_usage()

    def refuse_lost(self) -> None:
        """Raises RuntimeError until the user has cleared gradients of which a backward that has failed took a part."""
        left = next((self.names[i] for i in self.own if self.params[i].grad is not None), None) if self.lost else None
        if left is not None:
            raise RuntimeError(
                f"{left} has a gradient that is not whole: the last backward has failed, and had taken what was "
                "accumulated before it. Clear the gradients, optimizer.zero_grad(), before the next backward and "
                "before a step."
            )
        self.lost = False

    def abandon(self) -> None:
        """Waits for the reduce in flight, and forgets a backward that was interrupted."""
        self.taken = {}
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        self._forget_usage()

    def _forget_usage(self) -> None:
        self._maybe_unused, self._addends, self.used, self.missing = [], [], set(), False


class OwnedBucket(GradBucket):
    """At stage 2: `param.grad` is an OwnedGradient from the end of a backward on.

    `_sums`: by position, the shards to which the running backward has added, also where `param.grad` was cleared since.
    """

    def __init__(
        self, group: ShardGroup, *, sent_as: torch.dtype | None = None, of: Collection[Tensor] | None = None
    ) -> None:
        super().__init__(group, sent_as=sent_as, of=of)
        self._sums: dict[int, Tensor] = {}
        self._took = False  # whether the running backward has taken what was accumulated before it

    def take_written(self, index: int) -> None:
        """Takes the full gradient of a parameter that this rank has written and not reduced, if there is one. Raises
        RuntimeError for another parameter's OwnedGradient."""
        param = self.params[index]
        self._took = self._took or index in self.accumulated
        held = param.grad
        if isinstance(held, OwnedGradient):
            held.refuse_of_others(self.group, index)
            self.take(index, held.unreduced)
            held.unreduced = None
        else:
            param.grad = None
            self.take(index, held)

    def _held(self, index: int) -> Tensor | None:
        if index not in self._sums and isinstance(held := self.params[index].grad, OwnedGradient):
            self._sums[index] = held.shard
        return self._sums.get(index)

    def _set(self, index: int, gradient: Tensor) -> None:
        self._sums[index] = gradient

    def add_unused(self, used: Mapping[int, bool]) -> None:
        super().add_unused(used)
        self._took = False
        self.accumulated.difference_update(self.trained)
        sums, self._sums, main = self._sums, {}, self.group.main
        for index in self.reduced:
            param = self.params[index]
            if not isinstance(param.grad, OwnedGradient):
                shard = sums.get(index)
                if shard is None:  # this rank owns nothing of it
                    shard = torch.empty_like(self.group.shard_views[index], dtype=main.dtype, device=main.device)
                param.grad = OwnedGradient(param, Cut(ref(self.group), index), shard)

    def abandon(self) -> None:
        super().abandon()
        self._sums = {}
        self.interrupt()

    def interrupt(self) -> None:
        """A backward has failed: local."""
        if self._took:
            self._took, self.lost = False, True
            # Of zeros, and refused: without any gradient nobody could tell whether the user has cleared them.
            param = self.params[self.own[0]]
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad


# Elements of gradients that are copied by one call.
_SMALL = 1 << 16


class FullBucket(GradBucket):
    """At stage 1: every rank gets the averages of all gradients of some groups, in `param.grad`.

    A gradient is copied into a buffer in the layouts of the groups, one after another, and `param.grad` becomes a view
    of it; one all-reduce averages the buffer. What the next backward adds to such views is averaged where it lies. All
    this is as in DistributedDataParallel, except that the buffer is freed with the gradients. Owners sum those of 16
    bits in float32, keep these averages for their steps, and all ranks gather them rounded: such a bucket is of one
    group. They add those of the next backward to what they have, which is not sent once more.
    """

    def __init__(
        self, groups: Sequence[ShardGroup], of: Collection[Tensor], *, sent_as: torch.dtype | None = None
    ) -> None:
        super().__init__(groups[0], sent_as=sent_as, of=of, with_groups=groups[1:])
        group = groups[0]
        # Whether owners sum: 16 bits, or what is sent in another dtype.
        self._is_wide = len({self._sent_as, summed_as(self._sent_as), group.full.dtype}) > 1
        # Divided as they are copied, which costs no pass over the buffer; those of 16 bits are by ShardGroup.reduce.
        self._before = 1.0 if self._is_wide else 1 / group.comm.world
        self._channel = group.comm.channel(f"the gathering of the averages of {group.label}")
        self._gather: Work | None = None
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        # Small gradients that are still to be put there, by position, and how many elements they have.
        self._pending, self._pending_numel = dict[int, Tensor](), 0
        # Those of the last backward, while they are gradients.
        self._last: list[Callable[[], Tensor | None]] = []
        # Averages of this rank's shards that are wider than the parameters, by position; and those from before.
        self._wide: list[Tensor] = []
        self._aside: dict[int, Tensor] = {}

    def _begin(self, index: int | None = None, gradient: Tensor | None = None) -> list[Tensor]:
        """The views of the buffer of this backward, which is the last one's if its first gradient lies there."""
        if self._buffer is None:
            numel, begin = sum(one.layout.numel for one in self.groups), 0
            if gradient is not None and index is not None and self._is_last(index, gradient):
                self._buffer = part_of(gradient, (numel,), (1,), 0)
            else:
                self._buffer = self.group.full.new_empty(numel)
            self._views = []
            for one in self.groups:
                geometry = zip(one.shapes.full, one.shapes.strides, one.layout.offsets, strict=True)
                self._views += [part_of(self._buffer, shape, stride, begin + at) for shape, stride, at in geometry]
                begin += one.layout.numel
            self._last = [ref(view) for view in self._views]
        return self._views

    def _is_last(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient lies in the buffer of the last backward, whose gradients are all where it has put them.
        One that was taken away since may be kept by whoever has taken it, as it is or by another view of its memory,
        and would be written into; one that was frozen would be averaged once more."""
        if index not in self.reduced or not self._last or self._last[index]() is not gradient:
            return False
        views = {one: self._last[one]() for one in self.reduced}
        return all(one in self.trained and self.params[one].grad is view is not None for one, view in views.items())

    def set_aside(self) -> None:
        """Call it before a backward adds to gradients. Where owners sum, keeps what they have of the last averages, to
        which `finish` adds those of this backward."""
        for index in self.trained if self._is_wide and self._last else ():
            average = self._last[index]()
            if average is not None and self.params[index].grad is average and index not in self.accumulated:
                with as_plain_tensors():
                    if isinstance(average, WideAverage):
                        self._aside[index] = average.settled()
                    elif index in self.group.shapes.spans:
                        self._aside[index] = self.group.own_slice(index, average).clone()
                    else:
                        self._aside[index] = average.new_empty(0)
                self.params[index].grad = None

    def take_written(self, index: int) -> None:
        """Takes the gradient of a parameter that this rank has written since it was averaged last, if there is one."""
        if index in self.accumulated:
            self.take(index, self.params[index].grad)

    def take(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self._refuse(index, gradient)
        if self._buffer is None:
            self._begin(index, gradient)
        self.taken[index] = view = self._views[index]
        numel = gradient.numel()
        if numel < _SMALL:
            self._pending[index] = gradient
            self._pending_numel += numel
            if self._pending_numel >= _SMALL:
                self._put_pending()
        elif self._is_there(gradient, view):
            view.mul_(self._before)
        else:
            self.params[index].grad = torch.mul(gradient, self._before, out=view)

    def _is_there(self, gradient: Tensor, view: Tensor) -> bool:
        return shares_memory(gradient, view) and gradient.storage_offset() == view.storage_offset()

    def _put_pending(self, *, into_params: bool = True) -> None:
        """All at once: a call for each costs more than the copy."""
        views = [self._views[index] for index in self._pending]
        copied = [
            both for both in zip(views, self._pending.values(), strict=True) if not self._is_there(both[1], both[0])
        ]
        if copied:
            foreach("copy_", *map(list, zip(*copied, strict=True)))
        if self._before != 1 and views:
            foreach("mul_", views, [self._before] * len(views))
        for index, view in zip(self._pending, views, strict=True) if into_params else ():
            self.params[index].grad = view
        self._pending, self._pending_numel = {}, 0

    def _reduce(self) -> Work:
        group, views = self.group, self._begin()
        self._put_pending()
        for index in self.trained:
            if index not in self.taken:
                gradient = self.params[index].grad
                if gradient is None:
                    views[index].zero_()
                else:  # an average of before counts on, if another rank adds to it
                    self._pending[index] = gradient
        self._put_pending(into_params=False)
        assert self._buffer is not None
        if not self._is_wide:
            return group.average(self._buffer)
        message = self._buffer.to(self._sent_as), lengths(group.layout.bounds)
        return group.reduce([message])

    def finish(self) -> None:
        """Waits for the averages, if they are on their way; of 16 bits for those of this rank's shards."""
        handle, self._handle, group, buffer = self._handle, None, self.group, self._buffer
        if handle is None or buffer is None:
            return
        with group.recorded("wait_for_reduce"):
            averages: Tensor = handle.wait()
        if self._is_wide:
            self._wide = group.shapes.views_of_shard(averages)
            for index, before in self._aside.items():
                self._wide[index].add_(before.view_as(self._wide[index]))
            buffer[group.layout.segment(group.comm.rank)] = averages
            self._gather = group.gather(buffer, channel=self._channel)

    def add_unused(self, used: Mapping[int, bool]) -> None:
        """Sets the gradients of what other ranks alone have used."""
        here, gather, self._gather = self.used, self._gather, None
        super().add_unused(used)
        if gather is not None:
            gather.wait()
        self.reduced |= self._aside.keys()
        for index in self.reduced - here:
            self.params[index].grad = self._views[index]
        for index in self.reduced if self._wide and self._wide[0].dtype != self.group.full.dtype else ():
            average: Any = self.params[index].grad
            if has_values(average):
                as_wide_average(average, Cut(ref(self.group), index), Wide(self._wide[index]))
        self._buffer, self._views, self._wide, self._aside = None, [], [], {}
        self.accumulated.difference_update(self.trained)

    def abandon(self) -> None:
        self.lost = self.lost or bool(self.taken) or self.launched  # some are shares of averages already
        super().abandon()
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.wait()
        self.interrupt()
        self._buffer, self._views, self._wide = None, [], []
        self._pending, self._pending_numel = {}, 0

    def interrupt(self) -> None:
        """A backward has failed: local."""
        if self._aside:
            self.lost, param = True, self.params[next(iter(self._aside))]
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad  # as of OwnedBucket
            self._aside = {}


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

    def synchronize(self, buckets: Sequence[GradBucket], *, reduces: bool = True) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have done the same operations.

        Adds the gradients of parameters that only other ranks have used. For this, ranks exchange two bytes for each
        trained parameter, but only if some rank has sent zeros.
        """
        used_here = reduces and any(bucket.used for bucket in buckets)  # torch.autograd.grad writes into none
        if used_here and self.forwards and not any(self.forwards) and not self._has_warned:
            self._has_warned = True
            warn_user(_FORWARD_ALONE)
        some_sent_zeros = self.together.agree(int(any(bucket.missing for bucket in buckets)))
        for bucket in buckets:
            bucket.late = False
        used = self._used_anywhere(buckets) if some_sent_zeros else [{} for _ in buckets]
        for bucket, anywhere in zip(buckets, used, strict=True):
            bucket.add_unused(anywhere)

    def _used_anywhere(self, buckets: Sequence[GradBucket]) -> list[dict[int, bool]]:
        """Collective. Returns for each bucket whether any rank has used a parameter, by position."""
        used_here = [i in bucket.used for bucket in buckets for i in bucket.trained]
        anywhere = torch.tensor([used_here, [not used for used in used_here]], dtype=torch.uint8, device="cpu")
        for comm in self._comms:
            comm.all_reduce(anywhere, maximum=True)
        used, unused = map(iter, anywhere.bool().tolist())
        for bucket in buckets:
            bucket.late = True in [next(unused) for _ in bucket.trained]  # all of them are taken, also after the first
        return [{index: next(used) for index in bucket.trained} for bucket in buckets]
