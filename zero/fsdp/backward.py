"""Orders the unsharding of units and the reduction of their gradients in a backward.

backward of a unit    unshard, compute, reshard, wait for the gradients of the unit before, launch its own reduction
end of backward       complete the remaining units, wait for all reductions, compare the logs of the ranks

A unit that backward reaches again, through another forward's graph, waits for its reduction, and reduces once more.

Calls of one unit are reduced together, in one sum over the ranks, as with DistributedDataParallel. So a backward has to
know which calls it will pass. Those of the last forward count as expected. If several forwards of the model wait for a
backward, as where a loss is of two or one was dropped, ranks tell one another which of the graphs exist (`_expect`): a
graph that one rank alone keeps, or whose garbage was not collected there yet, is expected on none.
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
from zero.fsdp.edges import half_way, watch_param
from zero.fsdp.in_flight import Order, Reductions
from zero.fsdp.unit import Call, Index, Need, Unit
from zero.wrap.bucket import EndOfBackward


class Graph:
    """One forward of the model: hooks on its graph keep it."""


class Waiting(dict[int, weakref.ref[Graph]]):
    """The forwards, by number, that have begun with gradients since the last backward."""

    def __init__(self, comms: Sequence[Comm]) -> None:
        super().__init__()
        self._comms = [(comm, comm.channel("the graphs that a backward of FSDP may pass")) for comm in comms]

    def left(self) -> set[int]:
        """Collective. Those whose graph exists on every rank: no backward can pass another on all."""
        gone = torch.tensor([graph() is None for graph in self.values()], dtype=torch.uint8, device="cpu")
        for comm, channel in self._comms:
            comm.all_reduce(gone, maximum=True, channel=channel)
        return {max(self), *(number for number, is_gone in zip(self, gone.tolist(), strict=True) if not is_gone)}


class Backward:
    """The backward of one model.

    `reduces`: whether gradients are reduced; False under no_sync.
    `active`: whether a backward is running.
    `waiting`: the forwards that a backward is expected of.
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
        self.waiting = Waiting(comms)
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
        self._reductions = Reductions(order.in_flight, to_replicas=len(comms) > 1)

    @property
    def _interrupted(self) -> bool:
        """Whether an error has ended the backward: autograd has dropped its callback without calling it."""
        return self.active and self._end_callback is not None and self._end_callback() is None

    @property
    def _within_forward(self) -> bool:
        """Whether the backward runs within a forward, such as for forces from an energy."""
        return bool(self._index.running)

    def reached_inside(self, unit: Unit, call: Call, graph: Graph, _: Any) -> None:
        """The hook on outputs of modules inside the unit's."""
        if not unit.running:  # else its forward takes a gradient, such as forces from an energy, and it is unsharded
            self.reached(unit, call, graph, _)

    def reached(self, unit: Unit, call: Call, graph: Graph, _: Any) -> None:
        """The hook on the unit's outputs: unshards it before backward computes gradients of a call.

        graph: kept by this hook, for `waiting`. Raises RuntimeError for create_graph=True.
        """
        if Need.BACKWARD in unit.needed_by and call in unit.calls:
            return
        try:  # not a context, which costs two calls in each hook
            self._reached(unit, call)
        except Exception as error:
            self._together.tell(error)
            raise

    def _reached(self, unit: Unit, call: Call) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a gradient was asked for with create_graph=True through {unit.title} of FSDP, whose "
                "parameters are released by then. Take such gradients at stage 2 (ShardedDDP) or below."
            )
        self._begin()
        unit.calls.add(call)  # once more if the graph was retained, or is older than another backward
        self._complete_units_after(call)
        entered = [each for each in (unit, *self._index.reads[unit]) if Need.BACKWARD not in each.needed_by]
        for each in entered:
            self._enter(each)
        if not call.has_exit_hook:  # a re-entrant checkpoint runs a backward of its own, with an end of its own
            at_end_of_backward(partial(self.post_backward, unit, call))
        if entered and self._order.in_flight == 3:
            self._order.launch_before(unit)

    def watch_params(self) -> list[RemovableHandle]:
        """Registers hooks on parameters. What the loss reads of units that may stay unsharded after forward gives them
        gradients before backward reaches an output of the unit. Others tell when backward is half through a unit."""
        ahead = self._order.in_flight == 3
        handles = [
            watch_param(param, Backward.param_reached, self, unit)
            for unit in self._index.units
            if unit is self._index.root or unit.stays or ahead
            for param in unit.params
            # `watch_param` has each require a gradient for a moment, which torch refuses for integers.
            if param.is_floating_point() or param.is_complex()
        ]
        for unit in self._index.units[1:] if self._order.in_flight == 2 else ():
            param = half_way(unit)
            if unit.travels_meanwhile and param is not None and param.is_floating_point():
                handles.append(watch_param(param, Backward.half_way, self, unit))
        return handles

    def half_way(self, unit: Unit) -> None:
        """Collective. Has the all-gather of the next unit travel while the second half of this one is computed."""
        if unit in self._in_backward and not torch.is_grad_enabled():
            with self._together:
                # The reduction of the last unit, which the first half has covered: both together take more memory.
                self._reductions.free_wire()
                self._order.launch_before(unit)

    def param_reached(self, unit: Unit) -> None:
        """Enters backward of a unit that has stayed unsharded."""
        if Need.BACKWARD not in unit.needed_by and unit.unsharded and not torch.is_grad_enabled():
            with self._together:
                self._begin()
                self._enter(unit)

    def post_backward(self, unit: Unit, call: Call, *_: Any) -> None:
        """The hook on the unit's inputs: completes it once backward has passed all of its expected calls."""
        if Need.BACKWARD in unit.needed_by and unit.calls.passed(call):
            try:
                self._reduce_unit(unit)
            except Exception as error:
                self._together.tell(error)
                raise

    def _begin(self) -> None:
        if self._interrupted:
            self.abandon()
        if not self.active:
            self.active = True
            for streams in self._streams:
                streams.begin()
            self._compare_trained()
            if len(self.waiting) > 1:
                self._forget_dropped()
            # In a variable: each `self._finish` is a new object, and the reference to it would be dead at once.
            finish = self._finish
            self._end_callback = weakref.ref(finish, self._callback_dropped)
            at_end_of_backward(finish)

    def _compare_trained(self) -> None:
        """Collective where parameters were frozen or unfrozen since the last backward. Raises RuntimeError on every
        rank unless all ranks train the same."""
        buckets = [bucket for unit in self._index.units for bucket in unit.buckets]
        # A list: `any` of a generator would stop at the first change, and the other buckets would not notice theirs.
        changed = [bucket.notice_trained() for bucket in buckets]
        if not any(changed):
            return
        trained = [bucket.group.names[index] for bucket in buckets for index in bucket.trained]
        try:
            for comm, channel in self._trained:
                comm.compare("the parameters that are trained", trained, channel=channel)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                "which parameters require gradients has changed on this rank, but not on all alike; trained are now "
                f"{', '.join(trained)}. Freeze and unfreeze parameters on every rank. {error}"
            ) from error

    def _forget_dropped(self) -> None:
        """Collective. Forgets the calls of forwards whose graph does not exist on every rank."""
        left = self.waiting.left()
        for unit in self._index.units:
            unit.calls.difference_update([call for call in unit.calls if call.forward not in left])

    @property
    def expected(self) -> bool:
        """Whether a backward is running, or a forward waits for one."""
        return self.active or bool(self.waiting)

    def unshard_to_read(self, unit: Unit) -> None:
        """Collective within a backward. Unshards a unit whose parameters are read while a checkpoint computes a forward
        again, or by a hook, until the backward ends."""
        self._begin()
        if unit in self._reductions:  # its gradients come while it is sharded
            self._reductions.finish()
        unit.unshard(for_backward=True)
        unit.needed_by.add(Need.KEPT)

    def _enter(self, unit: Unit) -> None:
        for streams in self._streams:
            streams.expect_computing("{} of FSDP runs", unit.title)
        if unit in self._reductions:  # backward has reached it again; its gradients come while it is sharded
            self._reductions.finish()
        unit.unshard(for_backward=True)
        unit.pre_backward()
        self._in_backward.append(unit)

    def _complete_units_after(self, call: Call) -> None:
        """Completes the units that began to compute after this call had ended: backward has passed them."""
        for unit in self._in_backward[::-1]:
            if unit is self._index.root or unit.calls.complete_at_end:
                continue
            if all(other.begun > call.ended for other in unit.calls):
                self._reduce_unit(unit)

    def _reduce_unit(self, unit: Unit, *, at_end: bool = False) -> None:
        """Collective. Reshards the unit, launches the next all-gather, which is needed first, and then the reduction;
        under no_sync leaves the gradients where they are."""
        self._in_backward.remove(unit)
        for bucket in unit.buckets if self.reduces else ():
            bucket.take_written()
        # Before waiting: an all-gather into its memory need not wait for the reduction.
        unit.post_backward(within_forward=self._within_forward)
        if self.reduces:
            self._reductions.free_wire()
        else:
            self._left_unreduced = True
            for bucket in unit.buckets:
                bucket.keep_unreduced()
        if self._order.in_flight == 2 and not at_end:
            self._order.launch_before(unit)
        if self.reduces:
            self._reductions.launch(unit)

    def _finish(self) -> None:
        with self._together:
            self._finish_together()

    def _finish_together(self) -> None:
        within = self._within_forward
        for unit in reversed(self._index.units):
            if unit.calls and Need.BACKWARD not in unit.needed_by and not within and (unit.unsharded or unit.gathering):
                self._enter(unit)  # backward did not reach it here, but may have on other ranks, which reduce it
            if Need.BACKWARD in unit.needed_by:
                self._reduce_unit(unit, at_end=True)
            elif self.reduces and self._left_unreduced and any(bucket.left_unreduced for bucket in unit.buckets):
                for bucket in unit.buckets:
                    bucket.pre_backward()
                    bucket.take_written()
                self._reductions.free_wire()
                self._reductions.launch(unit)
        self._reductions.finish()
        for unit in self._index.units if not within else ():
            unit.post_backward()  # before gradients of what this rank has not used, which are the shards'
        with as_plain_tensors():
            self._end.reach([bucket for unit in self._index.units for bucket in unit.buckets])
            # The user reads gradients once backward() has returned; copies to the CPU may still be on their way.
            for group in self._index.groups:
                group.synchronize()
            self.active = False
            if not within:
                self.waiting.clear()
            if self.reduces:
                self._left_unreduced = False
        # The forward around this backward goes on, and reads units that were resharded with their gradients.
        for unit in self._index.units if within else ():
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
                    bucket.forget_set_aside()
        self._reductions.clear()
        self.active = False
        self.waiting.clear()
        self._in_backward.clear()
        for unit in self._index.units:
            unit.abandon()
