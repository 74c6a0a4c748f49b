"""One group of parameters in one flat buffer, and where that buffer exists.

    full    flat, layout.numel elements: every parameter, unsharded. It has memory while the group is UNSHARDED.
    shard   flat, this rank's segment, in the parameters' own dtype: all that is left while the group is SHARDED. A view
            of `full` in groups that are never freed (stages 1 and 2, a single rank), a tensor of its own in those that
            are.

The user's nn.Parameter objects stay what they are. Their `.data` points into `full`, or at what `part` holds of them.
`full` is freed by shrinking its storage and comes back in the same storage, so that views of it that autograd saved
in forward are valid again in backward. Where `full` is never freed, each parameter has a storage of its own on the
memory of `full`, so that no tool takes parameters of one buffer for tied weights.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zero.comm import Comm, Handle, Int8
from zero.comm.streams import NONE, NoStreams, apart, streams_of
from zero.oss.layout import Layout
from zero.oss.offload import Home
from zero.oss.shapes import Shapes, is_copy, with_own_storage
from zero.oss.shown import shown
from zero.oss.two_levels import Levels, NodeShard
from zero.oss.writes import Writes


class GroupState(enum.Enum):
    """Where a group's parameters are."""

    UNSHARDED = "unsharded"
    GATHERING = "being gathered"
    SHARDED = "sharded"


class ShardGroup:
    """Parameters of one dtype on one device, laid in one buffer and bound to it.

    params, names: the parameters in the order of the layout, and what errors call them.
    own_shard: keep this rank's segment in a tensor of its own, so that `full` can be freed (stage 3). Such a group
        starts SHARDED, others are UNSHARDED for good.
    compute_dtype: the dtype of `full`, where it is not the parameters' own; only with `own_shard`.
    shard_in_full: while UNSHARDED, free `shard` too and keep it in `full` alone: less memory where groups stay unsharded
        long, for one copy more. Only where both have one dtype.
    home: where `shard` lies, if not beside `full`; only with `own_shard`.
    levels: parameters are gathered within a node, from node shards; only with `own_shard`.
    label: what errors call the group.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        layout: Layout,
        comm: Comm,
        *,
        own_shard: bool = False,
        compute_dtype: torch.dtype | None = None,
        shard_in_full: bool = False,
        home: Home | None = None,
        levels: Levels | None = None,
        label: str | None = None,
    ) -> None:
        self.params, self.layout, self.comm, self._levels = list(params), layout, comm, levels
        self.state = GroupState.UNSHARDED
        self.shapes = Shapes(params, layout)
        self.rename(names, label or f"a bucket of {len(names)} parameters, from {names[0]}")
        self._handle: Handle | None = None

        self._own_shard = own_shard
        computed_as = compute_dtype or params[0].dtype
        self._frees = own_shard and (comm.world > 1 or home is not None or computed_as != params[0].dtype)
        self._summoned: Tensor | None = None
        self._writes = Writes(self.params)

        self.full = torch.zeros(layout.numel, dtype=params[0].dtype, device=params[0].device)
        beside = home is not None or comm.runs_beside(self.full)
        self.streams: NoStreams = streams_of(self.full) if beside else NONE
        self.full_views = self._views_to_bind(self.full)
        with torch.no_grad():
            for param, view in zip(self.params, self.full_views, strict=True):
                view.copy_(param)
            self._bind(self.full_views)
            own = self.full[layout.segment(comm.rank)]
            self.shard = home.place(own) if home else own.clone() if self._frees else own
        self.spans = {span.index: span for span in layout.spans(comm.rank)}
        self.shard_views = self.views_of_shard(self.shard)
        if not self._frees:
            self.shard_views = [with_own_storage(view) for view in self.shard_views]
        self._home = home
        alike = home is None and levels is None and computed_as == self.shard.dtype
        self._shard_in_full = shard_in_full and self._frees and alike
        if own_shard:
            if computed_as != self.shard.dtype:
                self.full = torch.empty(layout.numel, dtype=computed_as, device=self.full.device)
                self.full_views = self._views_to_bind(self.full)
            self._leave_shard()

    def __repr__(self) -> str:
        return f"ShardGroup({len(self.params)} x {self.full.dtype}, {self.state.value}, {self.layout.world} ranks)"

    def rename(self, names: Sequence[str], label: str) -> None:
        """What errors call the parameters and the group from now on; on every rank at the same point."""
        self.names, self.label = list(names), label
        self._channel = self.comm.channel(f"the gathering of {label}")
        self.node_shard = NodeShard(self.layout, self._levels, label) if self._levels else None

    def _views_to_bind(self, full: Tensor) -> list[Tensor]:
        views = self.shapes.views_of_full(full)
        return views if self._frees else [with_own_storage(view) for view in views]

    def views_of_shard(self, shard: Tensor) -> list[Tensor]:
        """What each parameter has of a tensor of the length of this rank's segment, in the shape of its shard."""
        return self.shapes.views_of_shard(shard, self.spans)

    # --------------------------------------------------------------------------------------- state

    def launch_gather(
        self, *, sent_as: torch.dtype | Int8 | None = None, ahead: bool = False, conceal: bool = False
    ) -> None:
        """Collective. Starts to bring every other rank's segment into `full`.

        sent_as: a dtype of fewer bytes to send it in; this rank's own segment keeps its precision. Quantised `full` is
            the same on all ranks where there is a shard beside it, which keeps its precision.
        ahead: it is needed later, and the shard was written before the forward or backward began that runs now.
        conceal: until `finish_gather` the parameters are NaN in their own shape, which takes one element of memory and
            cannot be written to, so that nobody takes for new what has not arrived.
        """
        assert self._handle is None, "a gather is in flight already"
        if self._own_shard:
            assert self.state is GroupState.SHARDED
            self.state = GroupState.GATHERING
        if conceal:
            unknown = self.full.new_full((), torch.nan)
            self._bind([unknown.expand(shape) for shape in self.shapes.full])
            self.state = GroupState.GATHERING
        with shown("unshard", self.label, self.comm.rank):
            launch = partial(self._launch_gather, sent_as)
            self._handle = self.streams.gather(
                self.sends_by, launch, ahead=ahead, from_host=apart(self.shard, self.full)
            )

    def _launch_gather(self, sent_as: torch.dtype | Int8 | None) -> Handle:
        sends_floats = self.full.is_floating_point() and self.comm.world > 1
        quantised = sent_as if isinstance(sent_as, Int8) and sends_floats else None
        if self._frees:
            self._writes.quantised = quantised
            self.full.untyped_storage().resize_(self.full.nbytes)
            with torch.no_grad():
                if self.node_shard is not None:
                    return self.node_shard.gather(self.full, self.shard, quantised)
                own = self.full[self.layout.segment(self.comm.rank)]
                own.copy_(self.shard.to(own.device, non_blocking=True))
            self._shard_used()
        fewer = sent_as is not None and sent_as.itemsize < self.full.element_size() and self.comm.world > 1
        if fewer and isinstance(sent_as, torch.dtype):
            return self._gather_compressed(sent_as)
        bounds, keeps_own = self.layout.bounds, not self._frees
        return self.comm.gather(self.full, bounds, self._channel, sent_as=quantised, keeps_own=keeps_own)

    def _gather_compressed(self, dtype: torch.dtype) -> Handle:
        low, high = self.layout.bounds[self.comm.rank : self.comm.rank + 2]
        sent = self.full.new_empty(self.full.numel(), dtype=dtype)
        sent[low:high] = self.shard
        handle = self.comm.gather(sent, self.layout.bounds, self._channel)

        def finish() -> None:
            handle.wait()
            self.full[:low] = sent[:low]
            self.full[high:] = sent[high:]

        return Handle(finish)

    def finish_gather(self) -> None:
        """Waits for the gather that is in flight; the parameters are unsharded afterwards."""
        assert self._handle is not None, "no gather is in flight"
        handle, self._handle = self._handle, None
        with shown("wait_for_unshard", self.label, self.comm.rank):
            handle.wait()
        if self._bound is not self.full_views:
            self._bind(self.full_views)
        if self._shard_in_full:
            self.shard.untyped_storage().resize_(0)
        self.state = GroupState.UNSHARDED
        self._writes.gathered()

    @property
    def gathering(self) -> bool:
        return self._handle is not None

    @property
    def sends_by(self) -> Comm:
        """The ranks among which `full` is gathered, and its gradients are reduced first."""
        return self.comm if self.node_shard is None else self.node_shard.within

    @property
    def frees(self) -> bool:
        """Whether `full` has no memory at rest, and other memory each time that it is gathered."""
        return self._frees

    @property
    def incomplete(self) -> bool:
        """Whether the last gather has failed: `full` does not hold all parameters."""
        return self.state is GroupState.GATHERING and self._handle is None

    def release(self) -> None:
        """Frees `full`, but of a rank alone; what is left is this rank's shard.

        What was written into the parameters while they were unsharded stays: each element as its owner wrote it.
        """
        assert self._own_shard and self._handle is None
        with shown("reshard", self.label, self.comm.rank):
            own = self.full[self.layout.segment(self.comm.rank)]
            if self._shard_in_full:
                self.shard.untyped_storage().resize_(self.shard.nbytes)
                with torch.no_grad():
                    self.shard.copy_(own)
            elif self._frees:
                if self._writes.any(own, self.shard):
                    self._writes.take_over(own, self.shard)
                self._shard_used()
            self._leave_shard()

    def look_for_writes(self) -> None:
        """Has the next `release` look whether there were writes that torch does not count; see Writes.look."""
        self._writes.look()

    def _leave_shard(self) -> None:
        self._bind(self.shard_views)
        if self._frees:
            self.streams.release()
            self.full.untyped_storage().resize_(0)
        self.state = GroupState.SHARDED

    def gather_of(self, shard: Tensor, to: int | None = None) -> Tensor | None:
        """Collective. What every rank has a shard of, put together in the layout's order, flat.

        shard: flat, of this rank's segment. to: the only rank of the group that gets it (None elsewhere), by default all.
        """
        assert len(shard) == len(self.shard)
        own = self.layout.segment(self.comm.rank)
        if to is not None and to != self.comm.rank:
            sent = shard.to(self.full.device)
            self.comm.collect([(owner, sent if owner == self.comm.rank else None) for owner in self._owners], to)
            return None
        full = self.full.new_empty(self.layout.numel, dtype=shard.dtype)
        with torch.no_grad():
            full[own] = shard
        if to is None:
            self.comm.gather(full, self.layout.bounds, self._channel).wait()
        else:
            self.comm.collect([(owner, full[self.layout.segment(owner)]) for owner in self._owners], to)
        return full

    def bring_home(self, gradient: Tensor) -> Tensor:
        """Where the shard lies, in its dtype. From a GPU to the CPU it is on its way until `settle`."""
        return self.streams.bring(gradient, self.shard)

    def settle(self) -> None:
        """Waits until what was brought home is there, and the shard is no longer being read."""
        self.streams.settle()

    def _shard_used(self) -> None:
        if self._home is not None:
            self._home.used(self.shard)

    @property
    def _owners(self) -> range:
        return range(self.comm.world)

    def summon(self, to: int | None = None, *, on_cpu: bool = False) -> None:
        """Collective. Makes the parameters full in their own dtype, in a buffer apart, for `dismiss` to end.

        to: the only rank of the group that sees them unsharded; by default all do. on_cpu: in the memory of the CPU.
        """
        assert self._own_shard and self.state is GroupState.SHARDED
        full = self.gather_of(self.shard, to)
        if on_cpu and full is not None:
            full = full.cpu()
        self._summoned = self.shard[:0] if full is None else full
        if full is not None:
            self._bind([with_own_storage(view) for view in self.shapes.views_of_full(full)])
            self.state = GroupState.UNSHARDED

    @property
    def summoned(self) -> bool:
        """Whether the group is between `summon` and `dismiss`."""
        return self._summoned is not None

    def dismiss(self, *, keep: bool) -> None:
        """Ends `summon`. keep: take over into the shard what was written into the full parameters meanwhile."""
        assert self._summoned is not None
        if keep and self.state is GroupState.UNSHARDED:
            with torch.no_grad():
                self.shard.copy_(self._summoned[self.layout.segment(self.comm.rank)])
        self._shard_used()
        self._summoned = None
        self._bind(self.shard_views)
        self.state = GroupState.SHARDED

    def _bind(self, views: Sequence[Tensor]) -> None:
        self._bound = views
        for param, view in zip(self.params, views, strict=True):
            param.data = view

    def reclaim(self) -> str | None:
        """Binds parameters again whose data was copied elsewhere and not changed, as `module.to("cpu:0")` does on the
        CPU. Returns the name of one whose data is other data, if there is one."""
        for param, view, name in zip(self.params, self._bound, self.names, strict=True):
            if param.data_ptr() != view.data_ptr() or param.dtype != view.dtype or param.device != view.device:
                if not is_copy(param.data, view):
                    return name
                param.data = view
        return None
