"""Orders the unsharding of units and the reduction of their gradients in a backward.

backward of a unit    unshard, compute, reshard, wait for the gradients of the unit before, launch its own reduction
end of backward       complete the remaining units, wait for all reductions, compare the logs of the ranks

A unit that backward reaches again, through another forward's graph, waits for its reduction, and reduces once more.

Autograd adds up what all uses of a parameter give before it writes `param.grad`, once a backward. So the calls of a
unit that one forward has made, which its graph knows, are waited for. A gradient that comes later, through the graph of
another forward or the forward of another unit, enters the unit again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zero._torch.autograd import at_end_of_backward
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm
from zero.comm.streams import HostStreams
from zero.comm.together import Together
from zero.fsdp.unit import Call, Index, Need, Order, Unit, half_way, watch_param
from zero.wrap.bucket import EndOfBackward


class Graph(list[tuple[Unit, Call]]):
    """The calls of one forward of the model, which a backward through its graph passes. Hooks on the graph keep it.

    reduces: whether gradients were to be reduced then, or accumulated under no_sync."""

    def __init__(self, *, reduces: bool = True) -> None:
        super().__init__()
        self.reduces = reduces

    # As objects: two graphs may have equal calls.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Backward:
    """The backward of one model.

    `reduces`: whether gradients are reduced; False under no_sync.
    `active`: whether a backward is running.
    """

    def __init__(
        self,
        index: Index,
        comms: Sequence[Comm],
        streams: Sequence[HostStreams],
        together: Together,
        order: Order,
    ) -> None:
        self.reduces = True
        self.active = False
        # The graphs that the running backward has come to.
        self._graphs: set[Graph] = set()
        # Whether backward has left gradients of a unit unreduced since the last one that reduced.
        self._left_unreduced = False
        self._index, self._streams, self._together, self._order = index, streams, together, order
        self._end = EndOfBackward(comms, "the end of a backward of FSDP")
        name = "a comparison of which parameters are trained, as that has changed there"
        remedy = "Freeze and unfreeze parameters on every rank."
        self._trained = [(comm, comm.channel(name, remedy)) for comm in comms]
        # Whether autograd computes in the thread that calls it. On a GPU it does in one of its own, which may end only
        # after that thread has cleared gradients.
        self._in_callers_thread = all(group.full.device.type == "cpu" for group in index.groups)
        # The callback that autograd holds until the end of this backward.
        self._end_callback: weakref.ref[Any] | None = None
        # Units in backward, in the order in which backward reached them.
        self._in_backward: list[Unit] = []
        # Units whose gradients are being reduced: the last one's are on the wire, which is waited for before the next
        # unit's are sent; those of one before it are being summed, or averaged over replicas.
        self._reducing: list[Unit] = []
        self._has_replicas = len(comms) > 1

    # ------------------------------------------------------------------------------------------------------ hooks

    def reached(self, unit: Unit, call: Call, graph: Graph, _: Any, *, inside: bool = False) -> None:
        """The hook on the unit's outputs: unshards it before backward computes gradients of a call. inside: on outputs
        of modules inside the unit's.

        Raises RuntimeError for create_graph=True.
        """
        if (Need.BACKWARD in unit.needed_by and call in unit.calls) or (inside and unit.running):
            return  # in its forward a gradient is taken, such as forces from an energy, and it is unsharded
        try:  # not a context, which costs two calls in each hook
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                    "parameters are released by then. Take such gradients at stage 2 (ShardedDDP) or below."
                )
            self._begin()
            expected = [(unit, call)]  # once more if a backward within the forward has passed it
            if graph not in self._graphs:
                self._graphs.add(graph)
                self._end.forwards.append(graph.reduces)
                expected += graph
            for caller, of_graph in expected:
                for each in (caller, *self._index.reads[caller]):  # none is left until backward has passed the call
                    each.calls.add(of_graph)
            # Backward has passed units that began to compute after this call had ended.
            for each in self._in_backward[::-1]:
                if each is not self._index.root and each.calls and all(one.begun > call.ended for one in each.calls):
                    self._reduce_unit(each)
            entered = [each for each in (unit, *self._index.reads[unit]) if Need.BACKWARD not in each.needed_by]
            for each in entered:
                self._enter(each)
            if not call.has_exit_hook:  # a re-entrant checkpoint runs a backward of its own, with an end of its own
                at_end_of_backward(partial(self.post_backward, unit, call))
            if entered and self._order.in_flight == 3:
                self._order.launch_before(unit)
        except Exception as error:
            self._together.tell(error)
            raise

    def watch_params(self) -> list[RemovableHandle]:
        """Registers hooks on parameters, whose gradients may come before backward reaches an output of the unit, or
        after it has passed the unit. Others tell when backward is half through a unit."""
        handles = [
            watch_param(param, Backward.param_reached, self, unit)
            for unit in self._index.units
            for param in unit.params
            # `watch_param` has each require a gradient for a moment, which torch refuses for integers.
            if param.is_floating_point() or param.is_complex()
        ]
        for unit in self._index.units[1:] if self._order.in_flight == 2 else ():
            param = half_way(unit)
            # By threads, those of Gloo, while the host computes.
            travels = not unit.overlaps and not any(group.comm.reads(group.full.device) for group in unit.groups)
            if travels and param is not None and param.is_floating_point():
                handles.append(watch_param(param, Backward.half_way, self, unit))
        return handles

    def half_way(self, unit: Unit) -> None:
        """Collective. Has the all-gather of the next unit travel while the second half of this one is computed."""
        if unit in self._in_backward and not torch.is_grad_enabled():
            with self._together:
                # The reduction of the last unit, which the first half has covered: both together take more memory.
                self._free_wire()
                self._order.launch_before(unit)

    def param_reached(self, unit: Unit) -> None:
        """A gradient of the unit is about to be written: enters its backward, unless that is running, until the end."""
        if Need.BACKWARD not in unit.needed_by and not torch.is_grad_enabled():
            with self._together:
                self._begin()
                self._enter(unit)

    def post_backward(self, unit: Unit, call: Call, *_: Any) -> None:
        """The hook on the unit's inputs: backward has passed the call. Completes units of which it was the last."""
        for each in (unit, *self._index.reads[unit]):
            if Need.BACKWARD in each.needed_by and call in each.calls:
                each.calls.discard(call)
                if not each.calls:
                    try:
                        self._reduce_unit(each)
                    except Exception as error:
                        self._together.tell(error)
                        raise

    # ---------------------------------------------------------------------------------------------- a backward

    def _begin(self) -> None:
        """Collective where parameters were frozen or unfrozen since the last backward. Raises RuntimeError on every
        rank unless all ranks train the same."""
        # An error has ended the last one, if autograd has dropped its callback without calling it.
        if self.active and self._end_callback is not None and self._end_callback() is None:
            self.abandon()
        if self.active:
            return
        self.active = True
        self._end.forwards.clear()
        for streams in self._streams:
            streams.begin()
        buckets = [bucket for unit in self._index.units for bucket in unit.buckets]
        # A list: `any` of a generator would stop at the first change, and the other buckets would not notice theirs.
        changed = [bucket.notice_trained() for bucket in buckets]
        if any(changed):
            trained = [bucket.group.names[index] for bucket in buckets for index in bucket.trained]
            try:
                for comm, channel in self._trained:
                    comm.compare("the parameters that are trained", trained, channel=channel)
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(
                    "which parameters require gradients has changed on this rank, but not on all alike; trained are "
                    f"now {', '.join(trained)}. Freeze and unfreeze parameters on every rank. {error}"
                ) from error
        # In a variable: each `self._finish` is a new object, and the reference to it would be dead at once.
        finish = self._finish
        self._end_callback = weakref.ref(finish, self._callback_dropped)
        at_end_of_backward(finish)

    def unshard_to_read(self, unit: Unit) -> None:
        """Collective within a backward. Unshards a unit whose parameters are read while a checkpoint computes a forward
        again, or by a hook, until the backward ends."""
        self._begin()
        if unit in self._reducing:  # its gradients come while it is sharded
            self._finish_reductions()
        unit.unshard(for_backward=True)
        unit.needed_by.add(Need.KEPT)

    def _enter(self, unit: Unit) -> None:
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        if unit in self._reducing:  # backward has reached it again; its gradients come while it is sharded
            self._finish_reductions()
        unit.unshard(for_backward=True)
        unit.pre_backward()
        self._in_backward.append(unit)

    def _reduce_unit(self, unit: Unit, *, at_end: bool = False) -> None:
        """Collective. Reshards the unit, launches the next all-gather, which is needed first, and then the reduction;
        under no_sync leaves the gradients where they are."""
        self._in_backward.remove(unit)
        for bucket in unit.buckets if self.reduces else ():
            bucket.take_written()
        # Before waiting: an all-gather into its memory need not wait for the reduction.
        unit.post_backward()
        if self.reduces:
            self._free_wire()
        else:
            self._left_unreduced = True
            for bucket in unit.buckets:
                bucket.keep_unreduced()
        if self._order.in_flight == 2 and not at_end:
            self._order.launch_before(unit)
        if self.reduces:
            self._launch_reduction(unit)

    def _free_wire(self) -> None:
        """Waits for the reduction in flight, not for sums and averages: a second message would be as large as a unit.
        What is sent next need not wait for these."""
        last = self._reducing[-1:]
        left = [bucket.wait_for_sent() for unit in last for bucket in unit.buckets]
        self._finish_reductions(but=last if any(left) else ())

    def _launch_reduction(self, unit: Unit) -> None:
        """Collective. Reduces the gradients that the unit's buckets have taken."""
        for bucket in unit.buckets:
            if bucket.trained:
                bucket.launch()
        self._reducing.append(unit)
        if self._order.in_flight == 1:
            self._finish_reductions()
        elif not self._has_replicas:  # averages over these go on beside the computing
            self._finish_reductions(but=[unit])

    def _finish_reductions(self, but: Sequence[Unit] = ()) -> None:
        """Waits until gradients are reduced, all but those of some units."""
        reduced, self._reducing = [unit for unit in self._reducing if unit not in but], [*but]
        if reduced:
            with as_plain_tensors():
                for unit in reduced:
                    for bucket in unit.buckets:
                        bucket.finish()

    def _finish(self) -> None:
        """The end of the backward."""
        with self._together:
            within = bool(self._index.running)  # a forward, such as for forces from an energy
            for unit in reversed(self._index.units):
                is_full = unit.unsharded or unit.gathering
                if unit.calls and Need.BACKWARD not in unit.needed_by and not within and is_full:
                    self._enter(unit)  # backward did not reach it here, but may have on other ranks, which reduce it
                if Need.BACKWARD in unit.needed_by:
                    self._reduce_unit(unit, at_end=True)
                elif self.reduces and self._left_unreduced and any(bucket.left_unreduced for bucket in unit.buckets):
                    for bucket in unit.buckets:
                        bucket.pre_backward()
                        bucket.take_written()
                    self._free_wire()
                    self._launch_reduction(unit)
            self._finish_reductions()
            for unit in self._index.units if not within else ():
                unit.post_backward()  # before gradients of what this rank has not used, which are the shards'
            with as_plain_tensors():
                buckets = [bucket for unit in self._index.units for bucket in unit.buckets]
                self._end.reach(buckets, reduces=self.reduces)
                # The user reads gradients once backward() has returned; copies to the CPU may still be on their way.
                for group in self._index.groups:
                    group.synchronize()
                self.active = False
                self._graphs.clear()
                torch.clear_autocast_cache()  # of parameters that a step changes next, and of a graph that was freed
                if self.reduces:
                    self._left_unreduced = False
            # The forward around this backward goes on, and reads units that were resharded with their gradients.
            for unit in self._index.units if within else ():
                if unit not in self._order.ahead:  # gathered for this backward, which did not come to it
                    unit.release(Need.AHEAD)
                if unit.needed_by:
                    unit.unshard()

    def _callback_dropped(self, _: Any) -> None:
        """Autograd has dropped its callback, which it does after an exception, without calling it. Later `abandon` does
        everything that waits for other ranks."""
        if self.active and self._in_callers_thread:
            # Gradients from before are there again at once, so that zero_grad clears them.
            self._in_backward.clear()
            for unit in self._index.units:
                unit.interrupt()

    def abandon(self) -> None:
        """Forgets a backward that an exception has ended, so that the model can be used again."""
        # On a GPU gradients from before are restored here, unless all were cleared meanwhile.
        if self.active and not self._in_callers_thread and all(param.grad is None for param in self._index):
            for unit in self._index.units:
                for bucket in unit.buckets:
                    bucket.set_aside.clear()  # the user has cleared what there was
        self._reducing.clear()
        self.active = False
        self._graphs.clear()
        self._in_backward.clear()
        for unit in self._index.units:
            unit.abandon()
