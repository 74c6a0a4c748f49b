"""One group of parameters in one flat buffer, sharded over ranks.

    full    flat, layout.numel elements: the full parameters. It has memory while the group is UNSHARDED
    shard   flat, this rank's segment, in the parameters' own dtype. A view of `full` in groups that are never freed
            (stages 1 and 2, a single rank), otherwise a tensor of its own

The user's nn.Parameter objects stay the same. Their `.data` is a view of `full` or `shard`; where several ranks have
shards, their class says so (sharded_parameter.py). `full` is freed by shrinking its storage, and is allocated again in
the same storage, so that views of it that autograd saved in forward are valid in backward. If `full` is never freed,
each parameter has a storage of its own on the memory of `full`: no tool takes those of one buffer for tied weights.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch.autograd import writes_so_far
from zero._torch.recording import profiler_range
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm, Work
from zero.comm.oplog import READ_BY_ALL
from zero.comm.streams import HOST, HostStreams, on_other_device, streams_of
from zero.comm.transport import Message, lengths
from zero.shards.cut import Asked, register
from zero.shards.layout import Layout
from zero.shards.log import logger
from zero.shards.offload import DEVICE, Offload
from zero.shards.placement import Placement
from zero.shards.shapes import Shapes, with_own_storage
from zero.shards.sharded_parameter import GRADIENT, mark, note_data, rest, traced, wake

# ------------------------------------------------------------------------------------------------------------ its state
#
# The states of a shard group, and the options by which it stores its parameters.


class GroupState(enum.Enum):
    """The state of a group's parameters.

    SUMMONED: they are full in a separate buffer, within summon_full_params; perhaps on another rank only.
    LOST: an all-gather failed, and `full` does not hold all of them.
    """

    SHARDED = "sharded"
    GATHERING = "being gathered"
    UNSHARDED = "unsharded"
    SUMMONED = "summoned"
    LOST = "lost"

    __hash__ = object.__hash__  # enum's own is Python, and takes as long as all else of `_become`


NEXT_WITH_OWN_SHARD = {
    GroupState.GATHERING: {GroupState.UNSHARDED, GroupState.SHARDED, GroupState.LOST},
    GroupState.SHARDED: {GroupState.GATHERING, GroupState.SUMMONED},
    GroupState.UNSHARDED: {GroupState.SHARDED},
    GroupState.SUMMONED: {GroupState.SHARDED},
    GroupState.LOST: set(),
}
NEXT_IN_PLACE = {
    GroupState.GATHERING: {GroupState.UNSHARDED, GroupState.LOST},
    GroupState.UNSHARDED: {GroupState.GATHERING},
    GroupState.LOST: {GroupState.GATHERING},  # which raises the cause of the failure
}
"""The states that may follow a state: in groups with a shard of their own, and in groups that gather in place."""


@dataclass(frozen=True)
class GroupOptions:
    """How a group stores its parameters.

    own_shard: the shard is a tensor of its own, so that `full` can be freed (stage 3). Such a group begins SHARDED;
        other groups are UNSHARDED except while they gather. The other options are for groups with a shard of their own.
    compute_dtype: the dtype of `full`, if it is not the parameters'.
    shard_in_full: `shard` is freed while the group is UNSHARDED, and copied from `full` at the reshard: less memory if
        groups stay unsharded for long. Ignored if the dtypes differ, and with offload.
    offload: where the tensors lie that are stepped; at stage 3 the shard itself.
    from_first: shards have the values of the first rank of all, and the parameters of the others are not read.
    """

    own_shard: bool = False
    compute_dtype: torch.dtype | None = None
    shard_in_full: bool = False
    offload: Offload = DEVICE
    from_first: bool = False


IN_PLACE = GroupOptions()
"""For groups that are never freed."""


# ----------------------------------------------------------------------------------------------------------- moved data
#
# Parameters are bound to views of a shard group's memory. Which of them lie elsewhere since: they were moved, cast or
# given other data.


MOVED = (
    "{!r} was moved, cast or given other data (`p.data = ...`) since it was sharded, and would lose it at the next "
    "all-gather. Write in place: `p.data.copy_(...)`, or `p.copy_(...)` under torch.no_grad(). Move and cast the model "
    "before wrapping it."
)


def elsewhere(params: Iterable[Tensor], views: Iterable[Tensor]) -> list[int]:
    """Returns the positions of the parameters that do not lie where the views do. Compares addresses only."""
    with as_plain_tensors():  # six times a step for each unit: lists of addresses take 0.7 of a loop over the pairs
        here, there = [*map(Tensor.data_ptr, params)], [*map(Tensor.data_ptr, views)]
    if here == there:
        return []
    return [index for index, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]


def refuse_moved(groups: Iterable[ShardGroup]) -> None:
    """Raises RuntimeError if a parameter of these groups has different data. Takes 0.1 ms for 258 parameters."""
    for group in groups:
        if (name := group.moved()) is not None:
            raise RuntimeError(MOVED.format(name))


def take_back(params: Sequence[Tensor], views: Sequence[Tensor], held: Iterable[Any]) -> None:
    """Writes data that a step has given its parameters (`p.data = ...`, by which some optimizers go back to earlier
    weights) to where it belongs, and binds the parameters to that again. They are plain ones. Data of another shape or
    on another device stays, and is refused later.

    held: what the optimizer holds. Where that is the memory from before, it gets memory of its own.
    """
    given = {index: params[index].data for index in elsewhere(params, views)}
    fits = [at for at, data in given.items() if (data.shape, data.device) == (views[at].shape, views[at].device)]
    if not fits:
        return
    overwritten = {views[at].untyped_storage().data_ptr() for at in fits}
    for tensor in _tensors_in(held):
        if tensor.untyped_storage().data_ptr() in overwritten and not any(tensor is param for param in params):
            tensor.data = tensor.detach().clone()
    # All are copied before any is written: a step may have swapped the data of two parameters.
    for at, data in [(at, given[at].clone()) for at in fits]:
        views[at].copy_(data)
        params[at].data = views[at]


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


# ------------------------------------------------------------------------------------------------------------ the group


# Elements that are compared at a time, so that temporaries are small; on GPUs so that launches are few.
_CHUNK, _ON_GPU = 2**18, 2**24

ACTS = ("unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce")
"""What is done to a group, in the profiler and the log."""


_HERE = nullcontext()  # the CPU has no streams


class ShardGroup:
    """Parameters of one dtype on one device, which are views of one flat buffer.

    params, names: the parameters in the order of the layout, and their names in error messages.
    label: the name of the group in error messages.
    `shard`: see above. `main`: the flat tensor that the optimizer steps: `shard`, or what stands in its place
        (masters.py).
    `views`: of `full` or `shard`, to which the parameters are bound. `cuts`: of which parameter each one's shard is.
    `marks_shards`: whether parameters say that they are shards while they are (sharded_parameter.py).
    `overlaps`: whether transfers overlap with computing. `one_host`: whether these reduce within one host alone.
    `reads`: who is asked when they are read while they are shards; None while no model has the group.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        layout: Layout,
        placement: Placement,
        options: GroupOptions = IN_PLACE,
        label: str | None = None,
    ) -> None:
        self.layout, self.placement, self.comm, self._replicas = layout, placement, placement.comm, placement.replicas
        self.rename(names, label or f"a bucket of {len(names)} parameters, from {names[0]}")
        self.state = GroupState.UNSHARDED
        self._next = NEXT_WITH_OWN_SHARD if options.own_shard else NEXT_IN_PLACE
        self.shapes = Shapes(params, layout, self.comm.rank)
        self.offload = options.offload
        computed_as = options.compute_dtype or params[0].dtype
        other_dtype = computed_as != params[0].dtype
        # Whether `full` has no memory while the group is SHARDED.
        self.frees = options.own_shard and (self.comm.world > 1 or options.offload.active or other_dtype)
        self.params = [*params]
        self.marks_shards = options.own_shard and self.comm.world > 1
        self.views: Sequence[Tensor] = ()
        self.cuts = register(self.params, self)
        self._leaves: list[Any] = []
        self.reads: Callable[[], Asked | None] = lambda: None
        self._handle: Work | None = None
        # The events after copies of gradients that are on their way to the CPU.
        self.copies: list[Any] = []
        self._summoned: Tensor | None = None
        # torch's count of writes into the full parameters at the last all-gather, of a group that frees them.
        self._written: int | None = None
        self.data_was_read = False
        self.stand_ins = torch.empty(len(params), dtype=torch.uint8, device="cpu")
        self._lay_out(placement, options, computed_as)

    def _lay_out(self, placement: Placement, options: GroupOptions, computed_as: torch.dtype) -> None:
        """Allocates `full` and `shard`, copies parameters (collectively those of the first rank), and binds them."""
        first, offload, layout = self.params[0], self.offload, self.layout
        other_dtype = computed_as != first.dtype
        self.full = torch.empty(layout.numel, dtype=first.dtype, device=first.device)
        self.overlaps = any(comm.overlaps(self.full) for comm in placement.all_groups())
        self.one_host = not self.overlaps or self.comm.link.one_host
        self.streams: HostStreams = streams_of(self.full) if offload.active or self.overlaps else HOST
        self._full_views = self._views_to_bind()
        with torch.no_grad():
            own = torch.empty_like(self.own_of_full) if self.frees else self.own_of_full
            read = partial(self.shapes.read, self.params)
            if options.from_first:
                placement.scatter(read, layout.bounds, own)
            elif self.frees:
                read(layout.bounds[self.comm.rank], own)
            else:
                read(0, self.full)
            self._bind(self._full_views, sharded=False)
        self.shard = self.main = offload.place(own) if self.frees and offload.active else own
        views = self.shapes.views_of_shard(self.shard)
        self.shard_views = views if self.frees else [with_own_storage(view) for view in views]
        alike = not offload.active and not other_dtype
        # Until after the first reshard, which would copy the shard from a `full` that has no values yet.
        self.shard_in_full = False
        # Called while the parameters are full: a Function of the user's that reads parameters of another unit records
        # them before it reads, and a node that was made then would expect gradients of the shard's shape. torch drops
        # nodes where a parameter is given data of another dtype or device; in inference mode there are none.
        if alike and self.marks_shards and not torch.is_inference_mode_enabled():
            trained = [param for param in self.params if param.requires_grad]
            # torch itself holds a leaf's node weakly: without the list the next one has the shape of the shard.
            self._leaves = [torch.autograd.graph.get_gradient_edge(param).node for param in trained]
        if options.own_shard:
            if other_dtype:
                self.full = torch.empty(layout.numel, dtype=computed_as, device=self.full.device)
                self._full_views = self._views_to_bind()
            self.reshard()
            self.shard_in_full = options.shard_in_full and self.frees and alike

    def round_to(self, dtype: torch.dtype) -> None:
        """Stores the parameters of a group that gathers in place in another dtype from here on."""
        self.full = self.full.to(dtype)
        self._full_views = self._views_to_bind()
        self._bind(self._full_views, sharded=False)
        self.shard = self.own_of_full
        self.shard_views = [with_own_storage(view) for view in self.shapes.views_of_shard(self.shard)]

    def __repr__(self) -> str:
        return f"ShardGroup({len(self.params)} x {self.full.dtype}, {self.state.value}, {self.layout.world} ranks)"

    def rename(self, names: Sequence[str], label: str) -> None:
        """Sets the names of the parameters and the group in error messages; on every rank at the same point."""
        self.names, self.label = [*names], label
        self._ranges = {act: profiler_range(f"zero::{act} {label}") for act in ACTS}
        channel = self.comm.channel
        self._gather, self._reduction = channel(f"the gathering of {label}"), channel(f"the reduction of {label}")
        if self._replicas is not None:
            self._averaging = self._replicas.channel(f"the averaging over replicas of {label}")
        self._full_channel = channel(f"the full tensors of {label}, as for state_dict()")
        self.read_channel = channel(f"the reading of a sharded tensor of {label}", READ_BY_ALL)

    def recorded(self, act: str) -> AbstractContextManager[Any]:
        """A context for an operation, one of ACTS: a range of the profiler, and at DEBUG a line of the log."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("rank %d: %s %s", self.comm.rank, act, self.label)
        return self._ranges[act]

    def _views_to_bind(self) -> list[Tensor]:
        views = self.shapes.views_of_full(self.full)
        return views if self.frees else [with_own_storage(view) for view in views]

    @property
    def master(self) -> Tensor | None:
        """The master weights: the stepped tensor, if its dtype is wider than that of the parameters; else None."""
        return self.main if self.main.element_size() > self.shard.element_size() else None

    def own_slice(self, index: int, full: Tensor) -> Tensor:
        """This rank's elements of a tensor of the shape of parameter `index`, of which it owns some, in the shape of
        its shard: a view, if the tensor's elements lie in the parameter's order."""
        span = self.shapes.spans[index]
        return self.shapes.shaped(index, self.shapes.in_memory_order(index, full)[span.start : span.stop])

    def as_shard(self, index: int, tensor: Tensor) -> Tensor:
        """Returns this rank's elements of a tensor that has the full shape of parameter `index`; others as they are."""
        own = self.shard_views[index]
        with as_plain_tensors():
            if tensor.shape != self.shapes.full[index] or tensor.shape == own.shape:
                return tensor
        # A copy: a view would keep the whole full tensor alive as long as the optimizer's state.
        return self.own_slice(index, tensor).clone() if index in self.shapes.spans else tensor.new_empty(own.shape)

    @property
    def own_of_full(self) -> Tensor:
        """This rank's segment of `full`."""
        return self.full[self.layout.segment(self.comm.rank)]

    def _bind(self, views: Sequence[Tensor], *, sharded: bool) -> None:
        """sharded: whether the parameters are shards then."""
        self.views = views
        wake(self.params)  # torch's own data is set
        for param, view in zip(self.params, views, strict=True):
            param.data = view
        if sharded and self.marks_shards:
            rest(self.params)

    def moved(self) -> str | None:
        """Returns the name of a parameter that lies elsewhere than where it was bound, if there is one."""
        return next((self.names[index] for index in elsewhere(self.params, self.views)), None)

    def set_gradient(self, index: int, gradient: Tensor | None) -> None:
        """Makes it the gradient of the shard of a parameter that is sharded."""
        if gradient is not None and self.marks_shards:
            mark(gradient, self.cuts[index])
        with as_plain_tensors():
            GRADIENT.__set__(self.params[index], gradient)

    def _become(self, state: GroupState) -> None:
        if state not in self._next[self.state]:
            raise AssertionError(f"{self.label} is {self.state.value}, and cannot become {state.value}")
        self.state = state

    @property
    def lends(self) -> bool:
        """Whether `full` holds the parameters."""
        return self.state is GroupState.UNSHARDED

    @property
    def readable(self) -> bool:
        """Whether the parameters are full on this rank."""
        return self.state is GroupState.UNSHARDED or self._summoned is not None

    def launch_unshard(self, channel: int | None = None, *, ahead: bool = False) -> None:
        """Collective. Launches the all-gather of the shards into `full`.

        channel: see `gather`. ahead: the parameters are needed later, and `shard` was written before the running
        forward or backward began.
        """
        self._become(GroupState.GATHERING)
        try:
            with self.recorded("unshard"), torch.no_grad():
                self._handle = self.gather(self.full, self.shard if self.frees else None, channel=channel, ahead=ahead)
                if self.offload.active:
                    self.offload.used(self.shard)
        except BaseException:
            # Without a failure of a transfer nothing was sent, as where torch.export traces: `full` is freed again.
            broken = any(comm.log.failure.broken for comm in self.placement.all_groups())
            self._become(GroupState.LOST if broken or not self.frees else GroupState.SHARDED)
            if not broken and self.frees:
                self._free()
            raise

    def finish_unshard(self) -> None:
        """Waits for the all-gather in flight, and binds the parameters to `full`.

        Raises RuntimeError after that if a parameter was given other data.
        """
        assert self._handle is not None, "no gather is in flight"
        handle, self._handle = self._handle, None
        self._written = None
        try:
            with self.recorded("wait_for_unshard"):
                handle.wait()
        except BaseException:
            self._become(GroupState.LOST)
            raise
        moved = None
        # Groups that gather in place stay bound. The same list is meant: `!=` would compare tensors.
        if self.views is not self._full_views:
            # Before `_bind`, which overwrites the traces; raised once the group can be resharded.
            moved = self.moved() if self.frees else None
            self._bind(self._full_views, sharded=False)
        if self.frees:
            self.data_was_read = traced()
            note_data(self.params)
        if self.streams is not HOST:
            self._leaves = []  # a node accumulates on the stream on which it was made, which may be another than now
        if self.shard_in_full:
            self.streams.drops(self.shard)
            self.shard.untyped_storage().resize_(0)
        if self.frees:
            self._written = writes_so_far(self.params)
        self._become(GroupState.UNSHARDED)
        if moved is not None:
            raise RuntimeError(MOVED.format(moved))

    def _take_over(self) -> None:
        """After writes into the full parameters, such as averages and clamps, copies elements that differ into the
        shard; where `full` has a lower precision, the others keep theirs: each element has its owner's value. torch
        counts writes, but not those through `param.data`, which is noted where it is read (FullParameter)."""
        if not (self.data_was_read or writes_so_far(self.params) != self._written):
            return
        with torch.no_grad():
            chunk = _CHUNK if self.full.device.type == "cpu" else _ON_GPU
            for now, own in zip(self.own_of_full.split(chunk), self.shard.split(chunk), strict=True):
                same = (now == own.to(now)).to(own.device)
                own.copy_(torch.where(same, own, now.to(own)))

    def reshard(self) -> None:
        """Binds the parameters to `shard`, and frees `full` (unless the group has one rank).

        Raises RuntimeError after that if a parameter was given other data.
        """
        if self._written is not None and not self.shard_in_full:  # else the shard is copied from `full` as a whole
            self._take_over()
        self._become(GroupState.SHARDED)
        with self.recorded("reshard"):
            if self.shard_in_full:
                self.shard.untyped_storage().resize_(self.shard.nbytes)
                with torch.no_grad():
                    self.shard.copy_(self.own_of_full)
            elif self.offload.active:
                self.offload.used(self.shard)
            moved = self.moved() if self.frees else None
            self._bind(self.shard_views, sharded=True)
            if self.frees:
                if self.streams is not HOST:
                    self.streams.release()
                self._free()
        if moved is not None:
            raise RuntimeError(MOVED.format(moved))

    def _free(self) -> None:
        try:
            self.full.untyped_storage().resize_(0)
        except RuntimeError as error:
            # torch never lets that memory be freed in place again. Whoever holds it keeps it; the group takes other.
            self.full = torch.empty_like(self.full)
            self._full_views = self._views_to_bind()
            self.full.untyped_storage().resize_(0)
            raise RuntimeError(
                f"NumPy, or another library, holds the memory of {self.label}, which is freed once its module has "
                "computed. Keep a copy in place of a view: param.detach().clone().numpy()."
            ) from error

    def to_main(self, sums: Tensor) -> Tensor:
        """Converts a gradient of the shard to the dtype and device of `main`. The copy arrives by `wait_for_copies`."""
        if sums.device == self.main.device:
            return sums.to(self.main.dtype)
        widens = sums.element_size() < self.main.element_size()
        sums = self.streams.copy_like(sums.to(self.main.dtype) if widens else sums, self.main)
        self.copies.append(self.streams.copy_event())
        return sums

    def wait_for_copies(self) -> None:
        """Makes the host wait for the copies of `to_main`."""
        while self.copies:
            self.copies.pop().synchronize()

    def synchronize(self) -> None:
        """Makes the host wait for copies of `to_main`, and for reads of `shard` by the device."""
        self.wait_for_copies()
        self.streams.synchronize()

    # ------------------------------------------------------------------------------------------------ transfers

    def gather(
        self, full: Tensor, shard: Tensor | None = None, *, channel: int | None = None, ahead: bool = False
    ) -> Work:
        """Collective. Launches the all-gather that fills a full buffer, which gets memory first if it has none.

        shard: this rank's shard; None if it lies in the buffer already. channel: of `comm`, by default "the gathering
        of" the group. ahead: see HostStreams.gathers.
        """
        streams, on_host = self.streams, self.streams is HOST
        with (
            _HERE
            if on_host
            else streams.gathers(ahead=ahead, from_host=shard is not None and on_other_device(shard, full))
        ):
            if shard is not None:
                full.untyped_storage().resize_(full.nbytes)
                own = full[self.layout.segment(self.comm.rank)]
                sent = shard if shard.dtype == own.dtype else shard.to(own.device, non_blocking=True)  # rounded there
                own.copy_(sent, non_blocking=True)
            work = self.comm.gather(full, self.layout.bounds, self._gather if channel is None else channel)
            return work if on_host else streams.arriving(work, self.comm, full)

    def average(self, full: Tensor) -> Work:
        """Collective, without replicas. Launches the all-reduce of a full buffer of gradients, each a share of it."""
        with _HERE if self.streams is HOST else self.streams.reductions():
            work = self.comm.launch_all_reduce(full, channel=self._reduction)
            return work if self.streams is HOST else self.streams.arriving(work, self.comm, full)

    def reduce(self, messages: Sequence[Message]) -> Work:
        """Collective. Launches a reduction. `wait` returns the averages for this rank's shard, flat, one message after
        another."""
        comm, replicas, streams, dtype = self.comm, self._replicas, self.streams, messages[0][0].dtype
        with _HERE if streams is HOST else streams.reductions():
            work = comm.reduce(messages, times=1 / comm.world, channel=self._reduction)
            if streams is HOST:
                return work if replicas is None else ReplicaWork(work, replicas, self._averaging, dtype)
            if replicas is None:
                return streams.arriving(work, comm, messages)
            sums = Work(work.wait())  # here, where sums that it still makes read what this stream has allocated
            reduction = streams.arriving(sums, comm, messages)
            with streams.averages():
                average = streams.arriving(ReplicaWork(sums, replicas, self._averaging, dtype), comm, None)
            average.before = reduction
            return average

    def gather_full(self, shard: Tensor, to: int | None = None) -> Tensor | None:
        """Collective. Gathers a full flat tensor of which each rank passes its shard, outside of the steps that train.

        shard: as long as this rank's segment. to: the rank of the group that gets it, by default all; None elsewhere.
        """
        comm, layout, device = self.comm, self.layout, self.full.device
        sizes = [(owner, numel * shard.element_size()) for owner, numel in enumerate(lengths(layout.bounds))]
        if to is not None and to != comm.rank:
            sent = shard.to(device)
            comm.collect([(owner, size, sent if owner == comm.rank else None) for owner, size in sizes], to, device)
            return None
        full = shard.new_empty(layout.numel, device=device)
        with torch.no_grad():
            full[layout.segment(comm.rank)] = shard
        if to is None:
            comm.gather(full, layout.bounds, self._full_channel).wait()
        else:
            comm.collect([(owner, size, full[layout.segment(owner)]) for owner, size in sizes], to, device)
        return full

    # --------------------------------------------------------------------------------------- summon_full_params

    def summon(self, to: int | None = None, *, on_cpu: bool = False) -> None:
        """Collective. Binds the parameters to a separate full buffer in their own dtype, until `end_summon`.

        to: the rank of the group that gets the buffer, by default all. on_cpu: the buffer is in the memory of the CPU.
        """
        assert self.state is GroupState.SHARDED
        full = self.gather_full(self.shard, to)
        self._become(GroupState.SUMMONED)
        if full is not None:
            self._summoned = full.cpu() if on_cpu else full
            views = self.shapes.views_of_full(self._summoned)
            self._bind([with_own_storage(view) for view in views], sharded=False)

    def end_summon(self, *, keep: bool) -> None:
        """Ends `summon`. keep: copies this rank's segment of the full parameters into `shard`."""
        self._become(GroupState.SHARDED)
        if keep and self._summoned is not None:
            with torch.no_grad():
                self.shard.copy_(self._summoned[self.layout.segment(self.comm.rank)])
        self.offload.used(self.shard)
        self._summoned = None
        self._bind(self.shard_views, sharded=True)

    def stay_full(self) -> None:
        """After `summon`, in place of `end_summon`: the group keeps no other memory, and is of no more use."""
        self.full = self.shard = self.main = self.full.new_empty(0)
        self._full_views = self.shard_views = []

    @property
    def at_rest(self) -> bool:
        """Whether parameters say that they are shards, unless an optimizer steps them."""
        return self.marks_shards and self.state is GroupState.SHARDED


class ReplicaWork(Work):
    """Averages what a reduction brings over replicas; between hosts in bfloat16, if gradients are sent so."""

    def __init__(self, reduction: Work, replicas: Comm, channel: int, sent_as: torch.dtype) -> None:
        self._reduction, self._replicas, self._channel, self._sent_as = reduction, replicas, channel, sent_as

    def wait(self) -> Tensor:
        averages: Tensor = self._reduction.wait()
        replicas, times = self._replicas, 1 / self._replicas.world
        if self._sent_as is not torch.bfloat16 or replicas.link.one_host or not replicas.overlaps(averages):
            replicas.all_reduce(averages, times=times, channel=self._channel)
            return averages
        sent = averages.to(self._sent_as)
        replicas.all_reduce(sent, channel=self._channel)
        return averages.copy_(sent).mul_(times)
