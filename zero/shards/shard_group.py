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

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch.recording import profiler_range
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm, Work
from zero.comm.channels import READ_BY_ALL
from zero.comm.streams import DONE, HOST, HostStreams, streams_of
from zero.shards.bound import MOVED, BoundParams
from zero.shards.cut import Asked
from zero.shards.group_state import IN_PLACE, NEXT_IN_PLACE, NEXT_WITH_OWN_SHARD, GroupOptions, GroupState
from zero.shards.layout import Layout
from zero.shards.log import logger
from zero.shards.placement import Exchange, Placement
from zero.shards.shapes import Shapes, with_own_storage
from zero.shards.sharded_parameter import note_data, traced

ACTS = ("unshard", "wait_for_unshard", "reshard", "reduce", "wait_for_reduce")
"""What is done to a group, in the profiler and the log."""


class ShardGroup:
    """Parameters of one dtype on one device, which are views of one flat buffer.

    params, names: the parameters in the order of the layout, and their names in error messages.
    label: the name of the group in error messages.
    `shard`: see above. `main`: the flat tensor that the optimizer steps: `shard`, or what stands in its place
        (masters.py).
    `bound`: the parameters, bound to views of `full` or `shard`.
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
        self.label, self.layout = label or f"a bucket of {len(names)} parameters, from {names[0]}", layout
        self.exchange = Exchange(placement, layout, self.label)
        self._name_channels()
        self.state = GroupState.UNSHARDED
        self._next = NEXT_WITH_OWN_SHARD if options.own_shard else NEXT_IN_PLACE
        self.shapes = Shapes(params, layout, self.comm.rank)
        self.offload = options.offload
        computed_as = options.compute_dtype or params[0].dtype
        other_dtype = computed_as != params[0].dtype
        # Whether `full` has no memory while the group is SHARDED.
        self.frees = options.own_shard and (self.comm.world > 1 or options.offload.active or other_dtype)
        self.params = [*params]
        self.bound = BoundParams(self, self.params, names, says_so=options.own_shard and self.comm.world > 1)
        self.reads: Callable[[], Asked | None] = lambda: None
        self._handle: Work | None = None
        # The events after copies of gradients that are on their way to the CPU.
        self.copies: list[Any] = []
        self._summoned: Tensor | None = None
        self.data_was_read = False
        self.stand_ins = torch.empty(len(params), dtype=torch.uint8, device="cpu")
        self._lay_out(placement, options, computed_as)

    def _lay_out(self, placement: Placement, options: GroupOptions, computed_as: torch.dtype) -> None:
        """Allocates `full` and `shard`, copies parameters (collectively those of the first rank), and binds them."""
        first, offload, layout = self.params[0], self.offload, self.layout
        other_dtype = computed_as != first.dtype
        self.full = torch.empty(layout.numel, dtype=first.dtype, device=first.device)
        # Whether transfers overlap with computing.
        self.overlaps = any(comm.overlaps(self.full) for comm in self.exchange.comms())
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
            self.bound.bind(self._full_views, sharded=False)
        self.shard = self.main = offload.place(own) if self.frees and offload.active else own
        views = self.shapes.views_of_shard(self.shard)
        self.shard_views = views if self.frees else [with_own_storage(view) for view in views]
        alike = not offload.active and not other_dtype
        # Until after the first reshard, which would copy the shard from a `full` that has no values yet.
        self.shard_in_full = False
        # Else torch drops the nodes: it does where a parameter is given data of another dtype or device.
        if alike:
            self.bound.keep_leaves()
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
        self.bound.bind(self._full_views, sharded=False)
        self.shard = self.own_of_full
        self.shard_views = [with_own_storage(view) for view in self.shapes.views_of_shard(self.shard)]

    def __repr__(self) -> str:
        return f"ShardGroup({len(self.params)} x {self.full.dtype}, {self.state.value}, {self.layout.world} ranks)"

    @property
    def names(self) -> list[str]:
        return self.bound.names

    @property
    def comm(self) -> Comm:
        """The ranks that own the shards."""
        return self.exchange.gathered_by

    def rename(self, names: Sequence[str], label: str) -> None:
        """Changes the names of the parameters and the group in error messages; on every rank at the same point."""
        self.bound.names, self.label = list(names), label
        self.exchange.rename(label)
        self._name_channels()

    def _name_channels(self) -> None:
        self._ranges = {act: profiler_range(f"zero::{act} {self.label}") for act in ACTS}
        self.full_channel = self.comm.channel(f"the full tensors of {self.label}, as for state_dict()")
        self.read_channel = self.comm.channel(f"the reading of a sharded tensor of {self.label}", READ_BY_ALL)

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

        channel: see Exchange.gather.
        ahead: the parameters are needed later, and `shard` was written before the running forward or backward began.
        """
        self._become(GroupState.GATHERING)
        shard = self.shard if self.frees else None
        try:
            with self.recorded("unshard"), torch.no_grad():
                self._handle = self.exchange.gather(self.full, shard, self.streams, channel=channel, ahead=ahead)
                if self.offload.active:
                    self.offload.used(self.shard)
        except BaseException:
            # Without a failure of a transfer nothing was sent, as where torch.export traces: `full` is freed again.
            broken = any(comm.log.failure.broken for comm in self.exchange.comms())
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
        try:
            with self.recorded("wait_for_unshard"):
                handle.wait()
        except BaseException:
            self._become(GroupState.LOST)
            raise
        moved = None
        # Groups that gather in place stay bound. The same list is meant: `!=` would compare tensors.
        if self.bound.views is not self._full_views:
            # Before `bind`, which overwrites the traces; raised once the group can be resharded.
            moved = self.bound.moved() if self.frees else None
            self.bound.bind(self._full_views, sharded=False)
        if self.frees:
            self.data_was_read = traced()
            note_data(self.params)
        if self.streams is not HOST:
            self.bound.forget_leaves()
        if self.shard_in_full:
            self.shard.untyped_storage().resize_(0)
        self._become(GroupState.UNSHARDED)
        if moved is not None:
            raise RuntimeError(MOVED.format(moved))

    def reshard(self) -> None:
        """Binds the parameters to `shard`, and frees `full` (unless the group has one rank).

        Raises RuntimeError after that if a parameter was given other data.
        """
        self._become(GroupState.SHARDED)
        with self.recorded("reshard"):
            if self.shard_in_full:
                self.shard.untyped_storage().resize_(self.shard.nbytes)
                with torch.no_grad():
                    self.shard.copy_(self.own_of_full)
            elif self.offload.active:
                self.offload.used(self.shard)
            moved = self.bound.moved() if self.frees else None
            self.bound.bind(self.shard_views, sharded=True)
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

    def to_main(self, sums: Tensor, *, for_step: bool = False) -> Tensor:
        """Converts a gradient of the shard to the dtype and device of `main`. The copy arrives by `wait_for_copies`.
        for_step: nobody but the step that has begun reads it, which may widen it piece by piece."""
        arriving: Any = DONE
        stays_narrow = for_step and self.offload.active
        if sums.device != self.main.device:
            widens = not stays_narrow and sums.element_size() < self.main.element_size()
            sums = self.streams.copy_like(sums.to(self.main.dtype) if widens else sums, self.main)
            arriving = self.streams.copy_event()
        elif not stays_narrow:
            return sums.to(self.main.dtype)
        if stays_narrow:
            sums, arriving = self.offload.narrow(sums, arriving, self.main)
        self.copies.append(arriving)
        return sums

    def wait_for_copies(self) -> None:
        """Makes the host wait for the copies of `to_main`."""
        while self.copies:
            self.copies.pop().synchronize()

    def synchronize(self) -> None:
        """Makes the host wait for copies of `to_main`, and for reads of `shard` by the device."""
        self.wait_for_copies()
        self.streams.synchronize()

    # --------------------------------------------------------------------------------------- summon_full_params

    def summon(self, to: int | None = None, *, on_cpu: bool = False) -> None:
        """Collective. Binds the parameters to a separate full buffer in their own dtype, until `dismiss`.

        to: the rank of the group that gets the buffer, by default all. on_cpu: the buffer is in the memory of the CPU.
        """
        assert self.state is GroupState.SHARDED
        full = self.gather_full(self.shard, to)
        self._become(GroupState.SUMMONED)
        if full is not None:
            self._summoned = full.cpu() if on_cpu else full
            views = self.shapes.views_of_full(self._summoned)
            self.bound.bind([with_own_storage(view) for view in views], sharded=False)

    def gather_full(self, shard: Tensor, to: int | None = None) -> Tensor | None:
        """Collective. Gathers the full flat tensor of which each rank passes its shard. See Exchange.gather_full."""
        return self.exchange.gather_full(shard, self.full.device, self.full_channel, to)

    def dismiss(self, *, keep: bool) -> None:
        """Ends `summon`. keep: copies this rank's segment of the full parameters into `shard`."""
        self._become(GroupState.SHARDED)
        if keep and self._summoned is not None:
            with torch.no_grad():
                self.shard.copy_(self._summoned[self.layout.segment(self.comm.rank)])
        self.offload.used(self.shard)
        self._summoned = None
        self.bound.bind(self.shard_views, sharded=True)

    def stay_full(self) -> None:
        """After `summon`, in place of `dismiss`: the group keeps no other memory, and is of no more use."""
        self.full = self.shard = self.main = self.full.new_empty(0)
        self._full_views = self.shard_views = []

    @property
    def at_rest(self) -> bool:
        """Whether parameters say that they are shards, unless an optimizer steps them."""
        return self.bound.says_so and self.state is GroupState.SHARDED
